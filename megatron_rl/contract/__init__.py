"""Agreements between the login node, the batch host and the ranks, which meet in files only.

    paths            the name of every file of a run
    codes            exit codes, causes, outcomes, and the deadlines and environment names that two sides share
    files            bytes: written whole or not at all, appended line by line, read again if a mount is stale
    shapes           a record type <-> a JSON object: what `@record` declares is checked in both directions
    records          a record <-> a file: `read`, `write`, `append`, `read_lines`, `RecordTail`; a reader never raises
    attempt_records  the types in attempts/NNN/
    heartbeat_files  heartbeats, which all ranks write every few seconds and one process reads
    plan_records     plan.json, and the steps of a plan on its nodes
    run_records      the types in the run directory, the user's index and the caches
    steady           deadlines in records, kept by a clock that nobody sets
    children         how one of our processes starts another, and ends with it
    bounded_json     JSON that others wrote, which may be nested without end
    learning         whether anything is learned in a run, or something is lost: warnings by name

Definitions belong here if two processes would disagree by defining them separately. Policy does not: the reader decides
what an unreadable file means for a run. Standard library only, and Python 3.9, the oldest python3 of a batch host.
"""

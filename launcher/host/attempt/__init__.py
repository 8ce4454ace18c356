"""One attempt of a run on the host side, with the steps before and after it.

job_context    the Slurm job of this process, from its environment
own            take the run for this job; conclude what earlier starts left
begin          create the folders of an attempt, enter it in the ledger
prepare        image, node health, assignment, all-reduce: everything before the training
interfaces     processes of an attempt and the job around it: on Slurm (slurm_steps, slurm_job), here (local_ranks)
replicas       inference replicas of an attempt: start, watch, start again
harvest        inference replicas in separate Slurm jobs
runner         while the steps run: signals, requests to leave, deadlines, hangs
conclude       the end: evidence, verdict, decision, ledger; also for ends that nobody saw
start_again    requeue the job or submit its successor, without bad nodes
slurm_run      all of this, for a Slurm job
"""

"""The batch script's host side between the health check and the steps: which node does what."""

import argparse
import sys
from typing import Dict, List

from launcher.host import health
from launcher.host.attempt.assignment import NotEnoughNodes, assign, is_dead
from launcher.host.attempt.avoid import just_excluded
from launcher.host.attempt.context import Here, ask_to_leave
from launcher.host.judge import causes
from launcher.host.slurm import client
from megatron_rl.contract.codes import EXIT_DRAINED, EXIT_FINISHED
from megatron_rl.run_dir import read_json, read_json_lines, write_json


def choose_nodes(here: Here, options: argparse.Namespace) -> int:
    """Without a step: judge the health reports and give every step its nodes. With one: print its nodes."""
    attempt = here.attempt
    hosts = client.hostnames(here.nodelist)
    if options.step == "fit":
        bad = (read_json(attempt.nodes) or {"bad": {}})["bad"]
        print(",".join(host for host in hosts if host not in bad))
        return EXIT_FINISHED
    if options.step:
        print(",".join((read_json(attempt.nodes) or {})["steps"][options.step]))
        return EXIT_FINISHED
    reports = health.read_reports(attempt)
    silent = options.checked and not reports.nodes  # then it is the check that failed, and not all nodes at once
    bad = health.judge(reports, hosts) if options.checked and not silent else {}
    bad.update(_should_be_avoided(here, hosts))
    for host, why in sorted(bad.items()):
        print("node {} is not used: {}".format(host, why))
    try:
        if silent:
            raise NotEnoughNodes("no node has answered the health check")
        assignment = assign(read_json(here.run.plan) or {}, hosts, bad, here.given)
    except NotEnoughNodes as error:
        write_json(attempt.nodes, {"steps": {}, "spare": [], "bad": bad})
        ask_to_leave(attempt, causes.BAD_NODES, "the health check")
        print(error, file=sys.stderr)
        return EXIT_DRAINED
    write_json(attempt.nodes, dict(assignment._asdict()))
    return EXIT_FINISHED


def _should_be_avoided(here: Here, hosts: List[str]) -> Dict[str, str]:
    """Nodes that this job got again although its last attempt wanted to be rid of them: its script was killed before
    it could tell Slurm."""
    ends = [line for line in read_json_lines(here.run.attempts_ledger) if line["event"] == "end"]
    if not ends or ends[-1].get("job_id") != here.job_id:
        return {}
    told = read_json(here.run.attempt(ends[-1]["attempt"]).requeued) or {"problem": "nothing was told"}
    if told["problem"] is None:
        return {}
    why = "attempt {} failed there".format(ends[-1]["attempt"])
    wanted = told.get("avoided")  # not those that the run cannot do without
    excluded = just_excluded(here.run, ends[-1])
    return {host: why for host in excluded if host in hosts and (wanted is None or host in wanted)}


def left(here: Here, options: argparse.Namespace) -> int:
    """Print how many nodes are left of the allocation, and their names."""
    job = client.patiently(lambda: client.show_job(here.job_id))
    still = client.hostnames(job["NodeList"])  # --no-kill takes out those that Slurm gave up
    states = client.patiently(lambda: client.node_states(still))
    hosts = [host for host in client.hostnames(here.nodelist) if not is_dead(states.get(host, "unknown"))]
    print(len(hosts), ",".join(hosts))
    return EXIT_FINISHED

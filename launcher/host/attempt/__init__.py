"""One attempt of a run on the host side, and what comes before and after it.

job_context    the Slurm job that this process is the host side of
own            who may run the run; what earlier starts left is concluded
begin          the run directory and the attempt: made, entered in the ledger
surroundings   what is known around an attempt: a Slurm job (slurm_job) or nothing (this_machine)
steps          what an attempt starts: steps of Slurm (slurm_steps) or processes (local_ranks)
prepare        image, node health, assignment, all-reduce: up to the training
runner         while the steps run: signals, requests to leave, deadlines, hangs
replicas       inference replicas that are started again
close          the end: evidence, verdict, decision, ledger; conclude does the same for ends that nobody saw
start_again    a job that comes back, without the nodes that `avoid` names; `host_fault` where nothing else works
"""

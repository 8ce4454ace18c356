"""One attempt of a run on the host side, and what comes before and after it.

job_context    the Slurm job that this process is the host side of
own            who may run the run; what earlier starts left is concluded
begin          the run directory and the attempt: made, entered in the ledger
interfaces     what an attempt starts, and what is known around it: a Slurm job (slurm_steps, slurm_replicas,
               slurm_job), this machine (local_ranks, this_machine)
replicas       the inference replicas of one: started, and started again
prepare        image, node health, assignment, all-reduce: up to the training
runner         while the steps run: signals, requests to leave, deadlines, hangs
conclude       the end: evidence, verdict, decision, ledger; the same for ends that nobody saw
slurm_run      all of this, for a job
start_again    a job that comes back, without the nodes that `avoid` names; `host_fault` where nothing else works
"""

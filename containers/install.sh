#!/usr/bin/env bash
# Inside nvcr.io/nvidia/pytorch: add what mrl needs. Run by the Dockerfile and by build.sbatch, nowhere else.
#
#   install.sh WHEEL...   the newest of them; with VLLM=yes in the environment also vLLM (install-vllm.sh)
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

versions() {
    python3 -c 'import importlib.metadata as m
print(*(f"{name}=={m.version(name)}" for name in ("torch", "transformer-engine", "apex", "numpy")))'
}

wheel=$(printf '%s\n' "$@" | sort -V | tail -n 1)
before=$(versions)
pip install --no-cache-dir -c "$here/constraints.txt" "${wheel}[train,huggingface,math,wandb,serve]"
after=$(versions)
if [[ $before != "$after" ]]; then
    echo "pip replaced packages that were built for this image: $before -> $after" >&2
    exit 1
fi
# Imports of the ranks and of `mrl serve`, so that a missing library fails this build and not a job.
python3 -c 'import megatron.core, megatron_rl.run.attempt, transformers, math_verify, megatron_rl.server.app'
echo "added mrl and its libraries to $before"
[[ -z ${VLLM:-} ]] || bash "$here/install-vllm.sh"

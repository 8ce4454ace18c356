#!/usr/bin/env bash
# Inside nvcr.io/nvidia/pytorch: add what mrl needs. Run by the Dockerfile and by build.sbatch, nowhere else.
#
#   install.sh WHEEL...   the newest of them; with VLLM=yes in the environment also vLLM (install-vllm.sh)
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

# The image's own constraints pin every package it was built with, such as packaging==23.2, which megatron-core is too new
# for. Only the builds that no index has must stay; pins.py reads them from what is installed.
unset PIP_CONSTRAINT
pins=$(mktemp)
trap 'rm -f "$pins"' EXIT
python3 "$here/pins.py" >"$pins"

# Images that were tried have a lock: all that they lack, with hashes. After it only the wheel itself is installed.
locked=$here/locked/image-pytorch-${NVIDIA_PYTORCH_VERSION:-}.txt
from=()
if [[ -f $locked ]]; then
    pip install --no-cache-dir --no-deps --require-hashes -r "$locked"
    from=(--no-index)
else
    echo "this image has no lock in $here/locked: pip chooses what constraints.txt leaves open, and checks no hashes" >&2
fi

wheel=$(printf '%s\n' "$@" | sort -V | tail -n 1)
pip install --no-cache-dir "${from[@]}" -c "$pins" -c "$here/constraints.txt" "${wheel}[train,huggingface,math,wandb,serve]"
if ! python3 "$here/pins.py" | diff "$pins" - >&2; then
    echo "pip replaced packages that were built for this image, see above" >&2
    exit 1
fi
# Imports of the ranks and of `mrl serve`, so that a missing library fails this build and not a job; then everything that
# they call on a GPU, as far as it can be imported without one.
python3 -c 'import megatron.core, megatron_rl.run.attempt, transformers, math_verify, megatron_rl.agent.server.application'
python3 -m megatron_rl.model.platform.gpu_calls flash-attn transformer-engine
echo "added mrl and its libraries to $(grep '^torch==' "$pins")"
[[ -z ${VLLM:-} ]] || bash "$here/install-vllm.sh"

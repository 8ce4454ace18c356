"""Megatron-LM's own format: a pickled file per tensor-parallel rank, release/mp_rank_XX/model_optim_rng.pt.

Uses the names of its default layers, Transformer Engine's, in which a norm belongs to the linear layer after it.
"""

from __future__ import annotations

import argparse
import pickle
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf.folder import MOST_MAPPED, WeightsFolder
from megatron_rl.checkpoint.hf.pretrained import fill
from megatron_rl.checkpoint.shards import RecordedFile
from megatron_rl.contract.files import check_regular
from megatron_rl.contract.manifest import CheckpointError
from megatron_rl.model.hf_mapping import EMBEDDING, OUTPUT, Weight, pieces
from megatron_rl.recipe.model import ModelConfig

TRACKER = "latest_checkpointed_iteration.txt"  # says `release`: the weights belong to no iteration
VERSION = 3.0  # version of the order of queries, keys and values


def their_name(name: str, *, experts: bool) -> str:
    name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    return name if experts else name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")


def write(folder: Path, model: ModelConfig, wanted: dict[str, Weight], files: WeightsFolder, tp: int) -> None:
    """Write the shards of `tp` ranks one after another, with one in memory at a time."""
    assert model.vocab_size is not None
    dtypes = {name: files.tensors[weight.sources[0].name].dtype for name, weight in wanted.items()}
    for rank in range(tp):
        state: dict[str, Tensor] = {}
        for name, weight in wanted.items():
            if name == OUTPUT and model.tied_embeddings:
                continue
            state[their_name(name, experts=model.num_experts is not None)] = tensor = torch.empty(
                _shape(weight, model.padded_vocab_size(model.vocab_size), tp), dtype=dtypes[name]
            )
            fill(tensor, weight, files, rank, tp)
        path = _file(folder, rank)
        path.parent.mkdir(parents=True)
        content = {
            "args": _arguments(model, tp, dtypes[EMBEDDING]),
            "checkpoint_version": VERSION,
            "iteration": 0,
            "model": state,
        }
        with RecordedFile(path, lambda: None) as file:  # torch's own writer loses the errno of a failed write
            file.save(content)
    (folder / TRACKER).write_text("release", encoding="utf-8")


def _shape(weight: Weight, padded_rows: int, tp: int) -> tuple[int, ...]:
    rows = padded_rows if weight.padded else sum(source.shape[0] for source in weight.sources)
    whole = [rows, *weight.sources[0].shape[1:]]
    if weight.split is not None:
        whole[weight.split] //= tp
    return tuple(whole)


def _file(folder: Path, rank: int) -> Path:
    return folder / "release" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt"


def _arguments(model: ModelConfig, tp: int, dtype: torch.dtype) -> argparse.Namespace:
    """Values that Megatron-LM takes from a checkpoint with --use-checkpoint-args, or compares."""
    assert model.vocab_size is not None
    scaling = model.rope_scaling
    return argparse.Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        group_query_attention=True,
        num_query_groups=model.num_query_groups,
        kv_channels=model.head_size,
        max_position_embeddings=model.max_position_embeddings,
        seq_length=model.max_position_embeddings,
        position_embedding_type="rope",
        add_position_embedding=False,
        use_rotary_position_embeddings=True,
        rotary_base=model.rope_base,
        rotary_percent=1.0,
        use_rope_scaling=scaling is not None,
        rope_scaling_factor=scaling.factor if scaling else 1.0,
        normalization="RMSNorm",
        norm_epsilon=model.layernorm_epsilon,
        apply_layernorm_1p=False,
        swiglu=True,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        untie_embeddings_and_output_weights=not model.tied_embeddings,
        num_experts=model.num_experts,
        moe_router_topk=model.experts_per_token,
        moe_ffn_hidden_size=model.expert_ffn_hidden_size,
        make_vocab_size_divisible_by=model.vocab_multiple // tp,
        padded_vocab_size=model.padded_vocab_size(model.vocab_size),
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=1,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        iteration=0,
        consumed_train_samples=0,
        consumed_valid_samples=0,
    )


class MegatronLMReader:
    """Reads shards written by `write`, or by Megatron-LM without pipeline stages."""

    def __init__(self, folder: Path, model: ModelConfig, wanted: dict[str, Weight]) -> None:
        """Raises CheckpointError if a shard is missing or damaged, or belongs to another model."""
        self._folder = folder
        self.names = [name for name in wanted if name != OUTPUT or not model.tied_embeddings]
        self._their = {name: their_name(name, experts=model.num_experts is not None) for name in self.names}
        self._ranks = len([path for path in (folder / "release").glob("mp_rank_*") if re.search(r"_\d+$", path.name)])
        self._shards = self._mapped()
        self._read = 0  # bytes read since they were mapped
        if not self._shards:
            raise CheckpointError(f"{folder / 'release'} holds no shard (mp_rank_00)")
        for rank, shard in enumerate(self._shards):
            for name, theirs in self._their.items():
                self._check(_file(folder, rank), shard, theirs, wanted[name])

    def _check(self, file: Path, shard: dict[str, Tensor], name: str, weight: Weight) -> None:
        if name not in shard:
            raise CheckpointError(f"{file} does not fit this model: it has no {name}")
        found = tuple(shard[name].shape)
        padded_rows = max(found[0] * self._ranks, weight.sources[0].shape[0])
        if found != (asked := _shape(weight, padded_rows, self._ranks)):
            raise CheckpointError(
                f"{file} does not fit this model: {name} is {list(found)}, but should be {list(asked)} in one of "
                f"{self._ranks} shards. Is a shard missing?"
            )

    def _mapped(self) -> list[dict[str, Tensor]]:
        return [_load(_file(self._folder, rank)) for rank in range(self._ranks)]

    def dtype(self, name: str) -> torch.dtype:
        return self._shards[0][self._their[name]].dtype

    def read(self, name: str, weight: Weight) -> dict[str, Tensor]:
        if self._read > MOST_MAPPED:
            self._shards, self._read = [], 0
            self._shards = self._mapped()
        found = {source.name: torch.empty(source.shape, dtype=self.dtype(name)) for source in weight.sources}
        for rank, shard in enumerate(self._shards):
            self._read += shard[self._their[name]].nbytes
            for piece in pieces(weight, shard[self._their[name]], rank, self._ranks):
                part = found[piece.source.name][piece.index]
                part.copy_(piece.view.reshape(part.shape))
        return found


def _load(path: Path) -> dict[str, Tensor]:
    try:
        check_regular(path)
        with torch.serialization.safe_globals([argparse.Namespace]):
            content: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        model: dict[str, Tensor] = content["model"]
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (RuntimeError, EOFError, KeyError, TypeError, OSError, pickle.UnpicklingError) as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} is damaged or no shard of Megatron-LM's ({why})") from error
    return model

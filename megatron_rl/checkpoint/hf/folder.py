"""A directory of Hugging Face weights: reads its safetensors in pieces, and checks them."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_rl.checkpoint.hf.fp8_blocks import fp8_weights
from megatron_rl.checkpoint.hf.mxfp4 import mxfp4_weights
from megatron_rl.checkpoint.hf.quantised import FindQuantised, QuantisedWeight
from megatron_rl.checkpoint.hf.stacked import stacked_experts
from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.contract.files import check_regular, names_in, read_bytes
from megatron_rl.model.hf_mapping import HfTensor
from megatron_rl.model.hf_weights import HF_OUTPUT
from megatron_rl.recipe.hf_config import CONFIG_FILE, PublishedConfig, UnusableWeights, read_hf_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # by the names in safetensors
PACKED = {"U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}  # of quantised weights
QUANTISED: Mapping[str, FindQuantised] = {"mxfp4": mxfp4_weights, "fp8": fp8_weights}
"""Readers by the quant_method of quantization_config."""
WHOLE_OR_SHARD = re.compile(r"model(-\d+-of-\d+)?\.safetensors")
"""Names of weight files for transformers, which ignores others such as Mistral's consolidated.safetensors."""
_LAYER = re.compile(r"model\.layers\.([0-9]{1,9})\.")
MOST_MAPPED = 2**28  # bytes read before a mapped file is reopened: until then they stay in memory


@dataclass(frozen=True, slots=True)
class Stored:
    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightsFolder:
    """Tensors of all files of a directory. Keeps one file open at a time."""

    def __init__(self, folder: Path) -> None:
        """Read config.json, the index and the header of every file.

        Raises UnusableWeights if a file is missing or damaged, or if two contradict each other.
        """
        self.folder = folder
        self.config: PublishedConfig = read_hf_config(folder)
        self.tensors: dict[str, Stored] = {}
        self._quantised: dict[str, QuantisedWeight] = {}
        self._parts: dict[str, Stored] = {}  # stored tensors of quantised weights
        self._open: tuple[str, Any] | None = None
        self._mapped = 0  # bytes read of the open file
        listed = _listed(folder)
        files = sorted(set(listed.values())) if listed else [SINGLE]
        _refuse_second_set(folder, files)
        for file in files:
            self._read_head(file, listed)
        for name, file in listed.items():
            if name not in self.tensors:
                raise UnusableWeights(f"{folder / INDEX} says that {file} holds {name}, which it does not")
        self._find_quantised()
        if not self.config.architecture.names.stacked_experts:
            self._find_stacked()

    def _find_stacked(self) -> None:
        """Replace stacked experts by single ones."""
        found = stacked_experts({name: stored.shape for name, stored in self.tensors.items()})
        self._parts |= {part: self.tensors.pop(part) for part in {weight.parts[0] for weight in found.values()}}
        for name, weight in found.items():
            whole = self._parts[weight.parts[0]]
            self.tensors[name] = Stored(whole.file, weight.shape, whole.dtype)
        self._quantised |= found

    def _find_quantised(self) -> None:
        """Replace the parts of quantised weights by what they stand for."""
        given = self.config.quantization or {}
        find = QUANTISED.get(given.get("quant_method", ""))
        try:
            found = find({name: stored.shape for name, stored in self.tensors.items()}, given) if find else {}
        except ValueError as error:
            raise UnusableWeights(f"{self.folder}: {error}") from error
        self._quantised |= found
        for name, weight in found.items():
            self._parts |= {part: self.tensors.pop(part) for part in weight.parts}
            self.tensors[name] = Stored(self._parts[weight.parts[0]].file, weight.shape, torch.bfloat16)
        packed = {dtype: name for name, dtype in PACKED.items()}
        for name, stored in self.tensors.items():
            if stored.dtype in packed:
                raise _wrong_type(self.folder / stored.file, name, packed[stored.dtype])

    def _read_head(self, file: str, listed: Mapping[str, str]) -> None:
        opened = self._file(file)
        for name in opened.keys():  # noqa: SIM118 - not a dict
            if listed and listed.get(name) != file:
                where = f"puts it into {listed[name]}" if name in listed else "does not know it"
                raise UnusableWeights(f"{self.folder / file} holds {name}, but {INDEX} {where}")
            found = opened.get_slice(name)
            dtype = (DTYPES | PACKED).get(found.get_dtype())
            if dtype is None:
                raise _wrong_type(self.folder / file, name, found.get_dtype())
            self.tensors[name] = Stored(file, tuple(found.get_shape()), dtype)

    def check(self, wanted: Iterable[HfTensor], *, tied: bool) -> None:
        """Check that the files hold exactly these tensors, in the shapes that config.json implies.

        tied: whether an output layer, which then repeats the embedding, is allowed.

        Raises UnusableWeights.
        """
        shapes = {source.name: source.shape for source in wanted}
        for name, shape in shapes.items():
            found = self.tensors.get(name)
            if found is None:
                raise UnusableWeights(f"{self.folder} holds no tensor {name}, which its {CONFIG_FILE} implies")
            if found.shape != shape:
                raise UnusableWeights(
                    f"{self.folder / found.file}: {name} is {list(found.shape)}, "
                    f"and by {CONFIG_FILE} it would be {list(shape)}"
                )
        known = {*shapes, *([HF_OUTPUT] if tied else []), *self.kept}
        # Files of Llama 2 and similar models include rotary frequencies, which follow from config.json.
        extra = [name for name in self.tensors if name not in known and not name.endswith("rotary_emb.inv_freq")]
        if extra:
            raise UnusableWeights(
                f"{self.folder / self.tensors[extra[0]].file} holds {extra[0]}, "
                f"which no model of the shape in {CONFIG_FILE} has"
            )

    @property
    def kept(self) -> list[str]:
        """Names of the tensors that are neither trained nor run here: exports contain them as they were published.
        Layers that predict further tokens follow the model's own layers, and others have other names."""
        shape, prefixes = self.config.shape, self.config.architecture.kept
        first = shape["num_layers"] if shape.get("prediction_layers") else math.inf
        numbers = {name: _LAYER.match(name) for name in self.tensors}
        return [
            name
            for name, found in numbers.items()
            if name.startswith(prefixes) or (found is not None and int(found[1]) >= first)
        ]

    def read(self, name: str, index: tuple[slice, ...] = (slice(None),)) -> Tensor:
        """Read a piece of a tensor to the CPU, in its stored dtype, or in bf16 if it is quantised. It may share the
        memory of the mapped file.

        Raises UnusableWeights if the file can no longer be read.
        """
        if (weight := self._quantised.get(name)) is None:
            return self._read(self.tensors[name].file, name, index)
        try:
            return weight.read(index, lambda part, box: self._read(self._parts[part].file, part, box))
        except ValueError as error:
            raise UnusableWeights(f"{self.folder}: {error}") from error

    def _read(self, file: str, name: str, index: tuple[slice, ...]) -> Tensor:
        if self._mapped > MOST_MAPPED:
            self._open = None
        piece: Tensor = self._file(file).get_slice(name)[index]
        self._mapped += piece.nbytes
        return piece

    @property
    def digest(self) -> str:
        """Hash of config.json and the names, sizes and headers of all files, but not of the weights, which take minutes
        to read. A file in the hub's cache is a link to a file named by its content, and that name counts."""
        content = hashlib.sha256(read_bytes(self.folder / CONFIG_FILE))
        for file in sorted({stored.file for stored in (*self.tensors.values(), *self._parts.values())}):
            path = (self.folder / file).resolve()
            content.update(f"{file} {path.name} {path.stat().st_size}\n".encode())
        heads = {name: [list(stored.shape), str(stored.dtype)] for name, stored in self.tensors.items()}
        content.update(json.dumps(heads, sort_keys=True).encode())
        return content.hexdigest()

    def _file(self, file: str) -> Any:
        from safetensors import SafetensorError, safe_open  # an extra of mrl

        if self._open is None or self._open[0] != file:
            self._open = None  # unmap the previous file before mapping the next
            self._mapped = 0
            path = self.folder / file
            try:
                check_regular(path)
                self._open = file, safe_open(path, framework="pt")
            except FileNotFoundError:
                raise UnusableWeights(f"{self.folder} is incomplete: {file} is missing") from None
            except (OSError, ValueError) as error:  # ValueError: an impossible file name in the index
                raise UnusableWeights(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
            except SafetensorError as error:
                raise UnusableWeights(f"{path} is cut short or damaged ({error}): fetch it again") from error
        return self._open[1]


def _wrong_type(file: Path, name: str, dtype: str) -> UnusableWeights:
    return UnusableWeights(f"{file}: {name} is of type {dtype}: weights of {', '.join(DTYPES)} can be used")


def _refuse_second_set(folder: Path, files: Sequence[str]) -> None:
    """Refuse a directory with a second set of weights, as left by a save over older ones.

    transformers would read `model.safetensors`, other tools what the index lists. Pickled copies (*.bin) do not count:
    many published models have the same weights in both formats.

    Raises:
        UnusableWeights: it is unknown which of the two sets is meant.
    """
    try:
        others = sorted(name for name in names_in(folder) if WHOLE_OR_SHARD.fullmatch(name) and name not in files)
    except OSError as error:
        raise UnusableWeights(f"{folder} cannot be listed: {error.strerror}") from error
    if not others:
        return
    read = SINGLE if files == [SINGLE] else f"the {len(files)} files that {INDEX} lists"
    more = f" and {len(others) - 1} more" if len(others) > 1 else ""
    raise UnusableWeights(
        f"{folder} holds two sets of weights: {read}, and {others[0]}{more}; remove the ones that are not meant"
    )


def _listed(folder: Path) -> dict[str, str]:
    """Tensor -> file by the index; empty for a single file without an index."""
    path = folder / INDEX
    try:
        files = bounded_json(read_bytes(path))["weight_map"]
    except FileNotFoundError:
        if (folder / SINGLE).exists():
            return {}
        pickled = "; only pickled ones (*.bin), which cannot be used" if list(folder.glob("*.bin")) else ""
        raise UnusableWeights(f"{folder} holds no weights: neither {SINGLE} nor {INDEX}{pickled}") from None
    except OSError as error:
        raise UnusableWeights(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UnusableWeights(f"{path} is not an index of safetensors: it has no JSON object weight_map") from error
    plain = isinstance(files, dict) and all(isinstance(file, str) and "/" not in file for file in files.values())
    if not plain or not files:
        raise UnusableWeights(f"{path} is not an index of safetensors: weight_map must say the file of each tensor")
    return files

"""Files of a teacher: its shape and its vocabulary. No torch: the launcher reads them too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_rl.contract.files import read_bytes
from megatron_rl.contract.paths import CARRIED, RunDir
from megatron_rl.recipe.config import RunConfig
from megatron_rl.recipe.distill import DistillConfig
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.flops import training_flops
from megatron_rl.recipe.hf_config import CONFIG_FILE, read_hf_config
from megatron_rl.recipe.hub import local_folder
from megatron_rl.recipe.model import ModelConfig
from megatron_rl.recipe.tokenizer_section import TokenizerConfig
from megatron_rl.recipe.vllm_options import heads_beyond_cpu

VOCABULARY_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class TeacherFiles:
    folder: Path
    model: ModelConfig
    is_checkpoint: bool
    """Whether the folder is a checkpoint instead of Hugging Face weights."""
    tokenizer: TokenizerConfig | None
    """Tokenizer of the run that the checkpoint belongs to; None if the folder holds the tokenizer's files."""

    @property
    def tokens(self) -> int:
        """Entries of its vocabulary; 0 if they are not known."""
        return self.model.vocab_size or len(self.vocabulary() or ())

    @property
    def parameters(self) -> int:
        """Parameters without norms and biases, a thousandth of all."""
        rows = self.tokens
        every_expert = self.model.model_copy(update={"experts_per_token": self.model.num_experts})
        products = training_flops(every_expert, rows, tokens=1, pairs=0, predictions=1) / 6  # 2 forward, 4 backward
        return int(products) + (not self.model.tied_embeddings) * rows * self.model.hidden_size

    def vocabulary(self) -> dict[str, int] | None:
        """Return the tokens of its tokenizer with their numbers; None if their file is not on this machine."""
        if self.tokenizer is None:
            return read_vocabulary(self.folder / CARRIED if self.is_checkpoint else self.folder)
        path = self.tokenizer.path if self.tokenizer.type == "huggingface" else None
        try:
            folder = None if path is None else local_folder(path, "tokenizer.path", VOCABULARY_FILE)
        except ValueError:
            folder = None
        return vocabulary_of(self.tokenizer, folder)


def teacher_files(folder: Path) -> TeacherFiles:
    """Read the shape of a teacher. Raises ConfigurationError if the folder holds none."""
    run = RunDir(folder.absolute().parent.parent)
    if folder.absolute().parent == run.checkpoints and run.resolved.is_file():
        try:
            sections = yaml.safe_load(read_bytes(run.resolved).decode("utf-8"))
            model = ModelConfig.model_validate(sections["model"])
            tokenizer = TokenizerConfig.model_validate(sections["tokenizer"])
        except (ValueError, yaml.YAMLError, OSError, LookupError, TypeError, RecursionError) as error:
            raise ConfigurationError(f"distill.teacher: {run.resolved} cannot be read: {error}") from error
        return TeacherFiles(folder, model, True, tokenizer)
    if (folder / CARRIED).is_dir():
        model = read_hf_config(folder / CARRIED).model()
        return TeacherFiles(folder, model, True, None)
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigurationError(
            f"distill.teacher: {folder} holds neither Hugging Face weights ({CONFIG_FILE}) nor a checkpoint of a run "
            "(.../checkpoints/step-000040)"
        )
    return TeacherFiles(folder, read_hf_config(folder).model(), False, None)


def against_teacher(
    config: RunConfig, distill: DistillConfig, teacher: TeacherFiles | None, tokenizer: Path | None
) -> Iterator[str]:
    """Yield the reason for each property of a teacher that the recipe cannot use. What cannot be known is not judged.

    Args:
        distill: one of `RunConfig.teachings`.
        teacher: its files; None if they are not on this machine, or the policy teaches itself.
        tokenizer: folder of the policy's tokenizer; None if it has none, or it is not on this machine.
    """
    own, count = vocabulary_of(config.tokenizer, tokenizer), distill.divergence.top_k if distill.divergence else None
    if own is not None and count is not None and count >= len(own):
        yield (
            f"distill.divergence.top_k is {count}, and the policy has {len(own)} tokens: leave it out, for each token "
            "to be a class"
        )
    if teacher is None:
        return
    of_teacher = teacher.vocabulary()
    if own is not None and of_teacher is not None and (difference := vocabulary_difference(own, of_teacher)):
        yield f"distill.teacher {distill.teacher}: {difference}"
    if config.sequence_length > teacher.model.max_position_embeddings:
        yield (
            f"distill.teacher {distill.teacher} knows {teacher.model.max_position_embeddings} positions, fewer "
            f"than training.sequence_length {config.sequence_length}"
        )
    if (replicas := distill.replicas) is not None:
        for reason in teacher.model.undivided(replicas.tp):
            yield f"distill.replicas.{reason} (distill.teacher {distill.teacher}); choose a size that divides it"
        yield from _against_vllm(config, distill.teacher, teacher)
    elif distill.server is None:
        layout = config.placement.training
        ep = layout.ep if teacher.model.num_experts else 1
        for reason in teacher.model.undivided(layout.tp, layout.pp, ep, stage_ends=layout.stage_ends):
            yield (
                f"distill.teacher {distill.teacher} is split like the policy (placement.training), but "
                f"{reason}; choose a layout that divides both, or give distill.replicas"
            )


def _against_vllm(config: RunConfig, name: str, teacher: TeacherFiles) -> Iterator[str]:
    if config.teacher_vllm is None:
        return
    if teacher.is_checkpoint:
        yield (
            f"distill.teacher {name} is a checkpoint, and distill.replicas.engine vllm reads Hugging Face weights: "
            "export it (`mrl convert`), or set native"
        )
    if config.job.device == "cpu" and (beyond := heads_beyond_cpu(teacher.model)) is not None:
        yield f"distill.teacher {name} has {beyond}: set distill.replicas.engine to native"


def vocabulary_difference(own: Mapping[str, int], teachers: Mapping[str, int]) -> str | None:
    """Name a token of the policy that the teacher does not have under the same number; None if there is none. The
    teacher may have further tokens, which the policy never samples."""
    different = sorted((number, token) for token, number in own.items() if teachers.get(token) != number)
    if not different:
        return None
    number, token = different[0]
    found = f"number {teachers[token]}" if token in teachers else "unknown"
    return (
        f"{len(different)} of the {len(own)} tokens of the policy are others in the teacher's tokenizer, such as "
        f"{token!r}, number {number}, which is {found} there; the teacher must have the tokenizer of the policy"
    )


def vocabulary_of(tokenizer: TokenizerConfig, folder: Path | None) -> dict[str, int] | None:
    """Return the tokens of a tokenizer with their numbers; None if its files are not on this machine.

    folder: of a Hugging Face tokenizer.
    """
    if tokenizer.type == "characters":
        return {character: number for number, character in enumerate(tokenizer.alphabet)}
    return None if folder is None else read_vocabulary(folder)


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Read the tokens of a Hugging Face tokenizer with their numbers; None if the folder has no readable
    tokenizer.json."""
    try:
        found = json.loads(read_bytes(folder / VOCABULARY_FILE))
        vocabulary = found["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: tokens with scores, in the order of their numbers
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in found.get("added_tokens", ())}
        return {**vocabulary, **added}
    except (OSError, ValueError, KeyError, TypeError):
        return None

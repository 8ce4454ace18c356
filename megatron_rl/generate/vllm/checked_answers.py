"""Unfinished answers of a replica: tokens come from vLLM, and leave once the weights that sampled them are checked."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from megatron_rl.generate.engine.interface import Delta, GenerationRequest
from megatron_rl.generate.engine.transcript import Amount, RowAnswer, Transcript
from megatron_rl.generate.vllm.client import NewTokens
from megatron_rl.generate.vllm.process import VllmGone
from megatron_rl.model.text_stream import Decode
from megatron_rl.recipe.inference import ends_of


@dataclass(slots=True)
class VllmAnswer:
    transcript: Transcript
    """Its checked tokens, those of an earlier attempt included."""
    known: int
    """Tokens that vLLM was given with the prompt."""
    unchecked: list[tuple[RowAnswer, int]] = field(default_factory=list)
    """Pieces that must not leave yet, with their policy versions."""
    left: bool = False
    """Whether its last tokens have left."""
    _versions: list[int] | None = None  # of the tokens since `known`, once vLLM has ended the answer
    _corrects: int = 0
    """Tokens that left, from the first one on that left under another version than vLLM reported at the end."""

    @property
    def prompt(self) -> list[int]:
        return [*self.transcript.request.prompt_tokens, *self.transcript.tokens]

    @property
    def ended(self) -> bool:
        return self.transcript.finish_reason is not None

    def take(self, piece: NewTokens, version: int, *, checked: bool) -> None:
        """Add a piece that was sampled by weights of this version, as far as vLLM does not say otherwise.

        Raises VllmGone for choices of experts of other tokens than vLLM computed.
        """
        if piece.choices:
            computed = len(self.prompt) + sum(len(each.tokens) for each, _ in self.unchecked) + len(piece.tokens) - 1
            if len(piece.choices) != computed:
                raise VllmGone(f"vLLM returned choices of experts for {len(piece.choices)} tokens of {computed}")
        choices = piece.choices[self.transcript.held.choices :]
        answer = RowAnswer(self.transcript.sample, piece.tokens, piece.logprobs, choices=choices)
        self.unchecked.append((answer, version))
        self._versions = piece.versions
        if checked:
            self.check()

    def check(self) -> None:
        for answer, version in self.unchecked:
            if not self.ended:  # vLLM does not know of stop strings
                self.transcript.extend(answer, version)
        self.unchecked.clear()
        if self._versions is not None:
            self._relabel(self._versions)
            self._versions = None

    def drop_unchecked(self) -> None:
        """Forget the tokens that were not checked, to have vLLM continue from the others."""
        self.unchecked.clear()
        self._versions = None
        self.known = len(self.transcript.tokens)

    def delta(self) -> Delta | None:
        """The tokens that have not left yet, and now have; None if there is nothing new."""
        if self.left or not (self.ended or len(self.transcript.tokens) > self.transcript.reported.tokens):
            return None
        self.left = self.ended
        delta = self.transcript.delta()
        if not self._corrects:
            return delta
        versions = self.transcript.versions
        return replace(delta, versions=versions[len(versions) - len(delta.tokens) - self._corrects :])

    def _relabel(self, versions: list[int]) -> None:
        """Set the version of each token since `known` to what vLLM reports for the whole answer. It differs where a
        piece was on its way while weights were swapped."""
        # vLLM reports versions once, at the end, and for the tokens that it sampled itself. Say 3 of 8 tokens were
        # known, and the sixth was on its way here while weights of version 7 were loaded:
        #
        #     labelled here   3 3 3 | 6 6 7 7 7
        #     from vLLM               6 6 6 7 7       -> the sixth token is relabelled
        #
        # If it had left by then, the driver has it under version 7, and the last tokens bring the right one along.
        versions = versions[: len(self.transcript.versions) - self.known]
        left = self.transcript.versions[self.known : self.transcript.reported.tokens]
        wrong = [at for at, (old, new) in enumerate(zip(left, versions, strict=False)) if old != new]
        self._corrects = len(left) - wrong[0] if wrong else 0
        self.transcript.versions[self.known : self.known + len(versions)] = versions


def shared_streams(answers: Iterable[VllmAnswer], most: int) -> list[list[VllmAnswer]]:
    """Group the answers that have not ended into requests to vLLM of at most `most` answers each: those to one prompt
    share a request, which saves 2 ms of its CPU for each.

    Some get their own request: those that continue known tokens; those with stop strings, because vLLM must stop
    sampling one when its string is found here; and greedy ones, because vLLM refuses several."""
    found: list[list[VllmAnswer]] = []
    for answer in answers:
        if answer.ended:
            continue
        request = answer.transcript.request
        alone = answer.known > 0 or bool(request.sampling.stop) or request.sampling.temperature == 0
        last = found[-1] if found else []
        if not alone and 0 < len(last) < most and last[0].known == 0 and last[0].transcript.request is request:
            last.append(answer)
        else:
            found.append([answer])
    return found


def begun(request: GenerationRequest, end_ids: Collection[int], decode: Decode) -> list[VllmAnswer]:
    """Return the answers to a request. One whose tokens are all known has ended already.

    Args:
        end_ids: end tokens of the tokenizer.
        decode: finds stop strings in the text.
    """
    ends = frozenset(ends_of(request.sampling, end_ids))
    answers = []
    for sample in range(request.num_samples):
        transcript = Transcript.begin(request, sample, ends, decode)
        transcript.reported = Amount(len(transcript.tokens), len(transcript.choices))  # the driver has them
        answers.append(VllmAnswer(transcript, len(transcript.tokens)))
    return answers

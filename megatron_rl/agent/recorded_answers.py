"""Recorded answers, to be scored again: their texts, or the turns of a program, which asks for them again."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.contract.rollout_records import SequenceLine
from megatron_rl.generate.engine.interface import Completion, FinishReason, GenerationRequest
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.inference import Sampling


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    sequences: Sequence[SequenceLine]
    responses: Sequence[str]
    """Texts of the model's turns in the first sequence, without special tokens."""
    finish_reason: FinishReason
    sampling: Sampling
    """Sampling of the run."""


class NotRecorded(ValueError):
    """A program asks for an answer that the record does not have."""


class RecordedInference:
    """Answers each prompt of a rollout with the turn that followed it in the record. Implements
    `InferenceInterface`."""

    def __init__(self, answer: RecordedAnswer, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cut_off = answer.finish_reason == "length"
        self._turns: defaultdict[tuple[int, ...], deque[Completion]] = defaultdict(deque)
        self.answered = 0
        self.strange = 0
        """Number of the first answer that was asked for and is not recorded, from 1; 0: there was none."""
        for sequence in answer.sequences:
            for first, end in sequence.turns:
                its = slice(first, end)
                turn = Completion(sequence.tokens[its], sequence.logprobs[its], "stop", sequence.versions[its])
                self._turns[tuple(sequence.tokens[:first])].append(turn)

    @property
    def left(self) -> int:
        """Number of recorded turns that nothing has asked for."""
        return sum(map(len, self._turns.values()))

    async def generate(self, request: GenerationRequest) -> list[Completion]:
        turns = self._turns[tuple(request.prompt_tokens)]
        if len(turns) < request.num_samples:
            self.strange = self.strange or self.answered + 1
            raise NotRecorded(f"answer {self.strange} of the rollout is asked for by a prompt that was not recorded")
        self.answered += request.num_samples
        return [self._ended(turns.popleft(), request) for _ in range(request.num_samples)]

    def _ended(self, turn: Completion, request: GenerationRequest) -> Completion:
        """Return a turn with the reason why it ended. The record has only that of the whole answer."""
        sampling = request.sampling
        text = self._tokenizer.decode(turn.tokens)
        stop = next((each for each in sampling.stop if each in text), None)
        ends = not self._tokenizer.end_ids.union(sampling.stop_tokens).isdisjoint(turn.tokens[-1:])
        cut = self._cut_off and stop is None and not ends and not request.grammar
        return turn._replace(stop=stop, finish_reason="length" if cut else "stop", grammar=request.grammar)

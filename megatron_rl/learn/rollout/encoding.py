"""Scored groups as bytes, for the bank's files and for messages between ranks. Bits are exact: tokens are int32 and
log-probs float32, as the engine has them."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np

from megatron_rl.agent.reward_value import TurnScore
from megatron_rl.agent.trajectories import UNSAMPLED, Branch, Problem, Trajectory, TrajectoryGroup
from megatron_rl.model.choices import Choices, shared_entries, split

TOKEN = np.dtype("<i4")
LOG_PROB = np.dtype("<f4")
VERSION = np.dtype("<i8")
_FLAG = np.dtype("?")
_HEAD_BYTES = struct.Struct("<I")

Head = dict[str, Any]


def encode_group(group: TrajectoryGroup) -> tuple[Head, bytes]:
    """Encode a group without its problem: the prompt stream knows it."""
    trajectories = group.trajectories
    sequences = group.sequences
    texts = [trajectory.text.encode("utf-8", "surrogatepass") for trajectory in trajectories]
    outputs = [trajectory.output.encode("utf-8", "surrogatepass") for trajectory in trajectories]
    of_choices: list[bytes] = []
    head: Head = {
        "ordinal": group.ordinal,
        "failures": dict(group.failures),
        # Lists with an entry for each sequence of each trajectory:
        "tokens": [len(sequence.tokens) for sequence in sequences],
        "turns": [[(turn.start, turn.stop) for turn in sequence.turns] for sequence in sequences],
        # Lists with an entry for each trajectory:
        "text": [len(text) for text in texts],
        "reward": [trajectory.reward for trajectory in trajectories],
        "finish_reason": [trajectory.finish_reason for trajectory in trajectories],
        "tool_calls": [trajectory.tool_calls for trajectory in trajectories],
        "components": [dict(trajectory.components) for trajectory in trajectories],
    }
    if len(sequences) > len(trajectories):
        head["sequences"] = [len(trajectory.sequences) for trajectory in trajectories]
    if group.lost:
        head["lost"] = [*group.lost]
    if group.begun_version != UNSAMPLED:
        head["begun_version"] = group.begun_version
    if any(outputs):
        head["output"] = [len(output) for output in outputs]
    if any(trajectory.turn_scores for trajectory in trajectories):
        head["turn_scores"] = [trajectory.turn_scores for trajectory in trajectories]
    choices = [sequence.choices for sequence in sequences]
    if any(choices):
        head["choices"], of_choices = _encode_choices(choices)
    if grammars := dict.fromkeys(grammar for sequence in sequences for grammar in sequence.grammars):
        number = {grammar: at for at, grammar in enumerate(grammars)}
        of_sequences = [[number[each] for each in sequence.grammars] for sequence in sequences]
        head["grammars"] = {"texts": [*grammars], "turns": of_sequences}
    turns = [(sequence, turn.start, turn.stop) for sequence in sequences for turn in sequence.turns]
    return head, b"".join(
        (
            _packed((sequence.tokens for sequence in sequences), TOKEN),
            *[bytes(sequence.loss_mask) for sequence in sequences],
            _packed((sequence.versions[start:stop] for sequence, start, stop in turns), VERSION),
            _packed((sequence.logprobs[start:stop] for sequence, start, stop in turns), LOG_PROB),
            *of_choices,
            *texts,
            *outputs,
        )
    )


def decode_group(head: Head, body: bytes, problem: Problem) -> TrajectoryGroup:
    reader = BodyReader(body)
    rewards = head["reward"]
    sequences = _sequences(head, reader)
    counts = head.get("sequences", [1] * len(rewards))
    texts = [reader.text(length) for length in head["text"]]
    outputs = [reader.text(length) for length in head.get("output", [0] * len(rewards))]
    of_turns = head.get("turn_scores", [()] * len(rewards))
    trajectories = [
        Trajectory.of_sequences(
            [*islice(sequences, count)],
            texts[i],
            rewards[i],
            head["finish_reason"][i],
            tool_calls=head["tool_calls"][i] if "tool_calls" in head else None,  # older banks have none
            components=head["components"][i] if "components" in head else {},  # older banks have none
            output=outputs[i],
        ).with_turn_scores(tuple(TurnScore(*score) for score in of_turns[i]))
        for i, count in enumerate(counts)
    ]
    lost, begun_version = tuple(head.get("lost", ())), head.get("begun_version", UNSAMPLED)
    return TrajectoryGroup(
        head["ordinal"], problem, trajectories, head["failures"], lost=lost, begun_version=begun_version
    )


def _sequences(head: Head, reader: BodyReader) -> Iterator[Branch]:
    """Return the sequences of all trajectories. The reader is then at the texts."""
    lengths = head["tokens"]
    turns = [[range(start, stop) for start, stop in each] for each in head["turns"]]
    sampled = [sum(map(len, each)) for each in turns]
    tokens = [reader.numbers(length, TOKEN) for length in lengths]
    masks = [reader.numbers(length, _FLAG) for length in lengths]
    versions = [reader.numbers(count, VERSION) for count in sampled]
    logprobs = [reader.numbers(count, LOG_PROB) for count in sampled]
    choices: list[Choices] = []
    for shared, count, unknown, size in head.get("choices", [(0, 0, [], 0)] * len(lengths)):
        beginning = choices[0][:shared] if choices else []
        choices.append(beginning + split(reader.data(size), count, unknown))
    grammars = head.get("grammars", {"texts": [], "turns": [[]] * len(lengths)})
    return iter(
        [
            Branch(
                tokens=tokens[i],
                loss_mask=masks[i],
                logprobs=_spread(logprobs[i], turns[i], length, 0.0),
                versions=_spread(versions[i], turns[i], length, -1),
                turns=turns[i],
                choices=choices[i],
                grammars=[grammars["texts"][number] for number in grammars["turns"][i]],
            )
            for i, length in enumerate(lengths)
        ]
    )


def _encode_choices(choices: Sequence[Choices]) -> tuple[list[tuple[int, int, list[int], int]], list[bytes]]:
    """Encode the choices of a group's sequences, which share those of the prompt.

    Returns for each sequence: entries at its beginning that are the first sequence's, further entries, those of them
    that are unknown, and the bytes of the others.
    """
    heads, bodies = [], []
    for own in choices:
        shared = 0 if own is choices[0] else shared_entries(choices[0], own)
        rest = own[shared:]
        bodies.append(b"".join(rest))
        heads.append((shared, len(rest), [at for at, each in enumerate(rest) if not each], len(bodies[-1])))
    return heads, bodies


def joined(head: Head, body: bytes) -> bytes:
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((_HEAD_BYTES.pack(len(text)), text, body))


def parted(message: bytes) -> tuple[Head, bytes]:
    (head_bytes,) = _HEAD_BYTES.unpack_from(message)
    start = _HEAD_BYTES.size + head_bytes
    return json.loads(message[_HEAD_BYTES.size : start]), message[start:]


def _packed(lists: Iterable[Iterable[float]], kind: np.dtype[Any]) -> bytes:
    """Bytes of all lists as one array: one per list would be slow with many short answers."""
    return np.array(list(chain.from_iterable(lists)), kind).tobytes()


def _spread(sampled: list[Any], turns: Iterable[range], length: int, elsewhere: float) -> list[Any]:
    """[length] values of sampled tokens at their positions, `elsewhere` at all others."""
    values: list[Any] = [elsewhere] * length
    taken = 0
    for turn in turns:
        values[turn.start : turn.stop] = sampled[taken : taken + len(turn)]
        taken += len(turn)
    return values


class BodyReader:
    """Reads a body from its start."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._position = 0

    def numbers(self, count: int, kind: np.dtype[Any]) -> list[Any]:
        return np.frombuffer(self.data(count * kind.itemsize), kind).tolist()

    def rest(self) -> bytes:
        return self.data(len(self._body) - self._position)

    def text(self, count: int) -> str:
        return self.data(count).decode("utf-8", "surrogatepass")

    def data(self, count: int) -> bytes:
        part = self._body[self._position : self._position + count]
        self._position += count
        return part

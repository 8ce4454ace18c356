"""Sequences of tokens of one rollout, from its calls: a tree whose paths are the branches.

Each answer hangs below the answer that its prompt continues:

    [prompt] answer 1 [tool result] answer 2             a conversation
                      [another result] answer 3          another one from the same beginning
    [summary] answer 4                                   a conversation cut short

A branch is the path to a last answer: here 1-2, 1-3 and 4. Each answer is trained in one branch, and is context in the
others that contain it. Neither the branches nor where an answer is trained depend on the order of parallel calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_rl.agent.trajectories import Branch, TrajectoryBuilder
from megatron_rl.generate.engine.interface import Completion


@dataclass(frozen=True, slots=True, eq=False)
class AnswerNode:
    parent: AnswerNode | None
    context: list[int]
    """Tokens between the parent and this answer; the whole prompt if there is no parent."""
    completion: Completion
    length: int
    number: int
    """Place among the answers of the rollout, in the order in which the model was asked for them."""
    children: list[AnswerNode] = field(default_factory=list)

    @property
    def path(self) -> list[AnswerNode]:
        path: list[AnswerNode] = []
        turn: AnswerNode | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    @property
    def prompt(self) -> list[int]:
        before = [] if self.parent is None else self.parent.tokens
        return before + self.context

    @property
    def tokens(self) -> list[int]:
        return [token for turn in self.path for token in (*turn.context, *turn.completion.tokens)]


class TreeBranch(NamedTuple):
    leaf: AnswerNode
    branch: Branch
    trained: Sequence[AnswerNode]
    """Answers that are turns of this branch; the others are context in it."""


class AnswerTree:
    def __init__(self) -> None:
        self._roots: list[AnswerNode] = []
        self.tokens = 0
        """Number of tokens; common beginnings count once."""

    def add(self, prompt: list[int], completions: Sequence[Completion], number: int = 0) -> list[AnswerNode]:
        """Add the answers to a prompt. number: of the first one, see `AnswerNode`."""
        parent = self.continued_by(prompt)
        known = 0 if parent is None else parent.length
        siblings = self._roots if parent is None else parent.children
        turns = [
            AnswerNode(parent, prompt[known:], one, len(prompt) + len(one.tokens), number + index)
            for index, one in enumerate(completions)
        ]
        siblings.extend(turns)
        self.tokens += sum(turn.length - known for turn in turns)
        return turns

    def continued_by(self, prompt: Sequence[int]) -> AnswerNode | None:
        """Return the longest known sequence with which the prompt begins; None if it begins with none. Of equal ones,
        return one that nothing continues yet."""
        longest: AnswerNode | None = None
        open_ = list(self._roots)
        while open_:
            turn = open_.pop()
            if not _continues(prompt, turn):
                continue
            open_ += turn.children
            if longest is None or (turn.length, not turn.children) > (longest.length, not longest.children):
                longest = turn
        return longest

    def leaves(self) -> list[AnswerNode]:
        return [turn for turn in self._turns() if not turn.children]

    def sequences(self) -> list[TreeBranch]:
        """Return the branches: first the one in which the model has sampled most."""
        # Branches share beginnings, and each answer must be trained once. With the branches 1-2 and 1-3, answer 1 is
        # trained in whichever comes first here and is context in the other. The order must not depend on which parallel
        # call came back first, or two runs with one seed would differ: so the branch with most sampled tokens goes
        # first, and among equal ones the tokens decide.
        paths = [(leaf, leaf.path) for leaf in self.leaves()]
        sizes = {leaf: sum(len(turn.completion.tokens) for turn in path) for leaf, path in paths}
        paths.sort(key=lambda each: (-sizes[each[0]], each[0].tokens))
        trained: set[AnswerNode] = set()
        found = []
        for leaf, path in paths:
            new = [turn for turn in path if turn not in trained]
            found.append(TreeBranch(leaf, _branch(path, trained), new))
            trained.update(path)
        return found

    def _turns(self) -> Iterator[AnswerNode]:
        open_ = list(self._roots)
        while open_:
            turn = open_.pop()
            yield turn
            open_ += turn.children


def _continues(prompt: Sequence[int], turn: AnswerNode) -> bool:
    """Whether a prompt that begins with the parent's tokens begins with this turn's."""
    if turn.length > len(prompt):
        return False
    answer = turn.completion.tokens
    begin = turn.length - len(answer)
    return prompt[begin : turn.length] == answer and prompt[begin - len(turn.context) : begin] == turn.context


def _branch(path: Sequence[AnswerNode], trained: Set[AnswerNode]) -> Branch:
    builder = TrajectoryBuilder([])
    for turn in path:
        builder.add_observation(turn.context)
        if turn in trained:
            builder.add_observation(turn.completion.tokens)
        else:
            builder.add_turn(turn.completion)
    return builder.branch()

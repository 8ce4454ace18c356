"""An environment of gymnasium (https://gymnasium.farama.org) that can be said in words, as it is: the model acts, turn
by turn, and is paid what the episode pays.

environment:
  name: gym/FrozenLake-v1
  args:
    instruction: "Walk from S to G without falling into H. Answer with left, down, right or up."
    actions: {left: 0, down: 1, right: 2, up: 3}
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import field_validator

from megatron_rl.agent.api import Demonstrator
from megatron_rl.agent.keys import stable_key
from megatron_rl.agent.multi_turn import MultiTurnAgent
from megatron_rl.agent.prompts import PromptConfig, next_turn, prompt_format, render_prompt
from megatron_rl.agent.trajectories import Problem
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import NonNegativeInt, PositiveInt


class GymConfig(PromptConfig):
    """Arguments of the environment `gym`."""

    id: str
    """Registered id of the environment, such as FrozenLake-v1."""
    kwargs: dict[str, Any] = {}
    """Arguments with which gymnasium makes it."""
    actions: dict[str, int] = {}
    """What the model may say, and the action that it means; default: the number of the action."""
    instruction: str = "Answer with the number of your next action."
    """What stands before the first observation."""
    episodes: PositiveInt = 256
    """Episodes to train on: seeds from 0 on."""
    held_out: NonNegativeInt = 64
    """Episodes of the evaluation set held_out: the seeds after those."""
    max_turns: PositiveInt = 16
    """Actions of an episode at most."""
    invalid_action_reward: float = -1.0
    """Added where a response names no action, which ends the episode. Choose less than the worst episode is paid: else
    saying nothing is how to avoid it."""

    def extras(self) -> list[str]:
        """Extras of mrl that the packages it imports come with."""
        return ["gym"]

    @field_validator("actions")
    @classmethod
    def _can_be_told_apart(cls, actions: dict[str, int]) -> dict[str, int]:
        if "" in actions:
            raise ValueError("an action without a name is in every response")
        if len({name.lower() for name in actions}) < len(actions):
            raise ValueError(f"capitals do not count in {', '.join(actions)}: name each action otherwise")
        return actions


class Played(NamedTuple):
    """How far an episode has come."""

    seen: str
    paid: float
    over: bool


class GymEnvironment(MultiTurnAgent, Demonstrator):
    """An environment of gymnasium with numbered actions, which can be said in words.

    Nothing is kept between turns: an episode is played again from its seed each time, so one that is interrupted goes
    on. A response that names no action ends it. It runs in the rank's event loop, so a step must be quick.
    """

    Config = GymConfig
    config: GymConfig
    variant_argument = "id"

    def __init__(self, config: GymConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError where gymnasium is missing, has no such environment, or its actions are not numbered."""
        super().__init__(config, tokenizer)
        self.max_turns = config.max_turns
        self._episode = _make(config)  # one for all: making it takes ten times as long as a step
        numbered = _actions(config.id, self._episode.action_space)
        if not {*config.actions.values()} <= {*numbered}:
            raise ValueError(f"environment.args.actions: {config.id} has {numbered.start} to {numbered.stop - 1}")
        self._words = config.actions or {str(action): action for action in numbered}
        longest_first = sorted(self._words, key=len, reverse=True)
        self._action = re.compile("|".join(map(_named, longest_first)), re.IGNORECASE)
        self._meant = [self._words[word] for word in longest_first]
        self.prompt_format = prompt_format(tokenizer, config)

    def training_problems(self) -> Sequence[Problem]:
        return self._problems(range(self.config.episodes))

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        held_out = range(self.config.episodes, self.config.episodes + self.config.held_out)
        return {"held_out": self._problems(held_out)} if held_out else {}

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """Random actions, which teach how one is named and not which is right; none where there is a chat template."""
        if self.prompt_format:
            return []
        pairs = []
        for problem in self.training_problems():
            draw, conversation = random.Random(stable_key("gym", problem.golden["seed"])), problem.prompt
            said: list[str] = []
            seen: str | None = ""
            while seen is not None and len(said) < self.max_turns:
                said.append(draw.choice([*self._words]))
                pairs.append((conversation, said[-1]))
                seen = self.get_observation(said, problem.golden)
                conversation += f"{said[-1]}{seen}"
        return pairs

    def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> str | None:
        played = self._play(golden["seed"], responses)
        return None if played.over else next_turn(self.tokenizer, played.seen)

    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float:
        """The sum of what the actions were paid."""
        return self._play(golden["seed"], responses).paid

    def _problems(self, seeds: range) -> list[Problem]:
        return [Problem(self._asked(self._play(seed, []).seen), {"seed": seed}) for seed in seeds]

    def _asked(self, seen: str) -> str:
        message = "".join(f"{part}\n" for part in (self.config.instruction, seen) if part)
        return render_prompt(self.tokenizer, message, self.config)

    def _play(self, seed: int, responses: Sequence[str]) -> Played:
        """What becomes of an episode by these responses."""
        episode = self._episode
        observation, _ = episode.reset(seed=seed)
        paid, over = 0.0, False
        for response in responses:
            found = [*self._action.finditer(response)]
            if not found:
                return Played("", paid + self.config.invalid_action_reward, True)
            observation, reward, ended, cut_off, _ = episode.step(self._meant[(found[-1].lastindex or 0) - 1])
            paid, over = paid + float(reward), ended or cut_off
        return Played(_seen(episode, observation), paid, over)


def _named(word: str) -> str:
    """The pattern of an action's name, a group: where it begins or ends as words do, no longer word has it."""
    before, after = (r"\b" if re.match(r"\w", edge) else "" for edge in (word[0], word[-1]))
    return f"({before}{re.escape(word)}{after})"


def _make(config: GymConfig) -> Any:
    try:
        import gymnasium  # what the launcher lacks, which only checks the arguments
    except ImportError as error:
        raise ValueError(f"environment gym needs `pip install gymnasium`: {error}") from error
    text = {"render_mode": "ansi"} if "ansi" in _render_modes(gymnasium, config.id) else {}
    try:
        return gymnasium.make(config.id, **{**text, **config.kwargs})
    except (gymnasium.error.Error, TypeError, ValueError) as error:
        raise ValueError(f"environment.args: gymnasium cannot make {config.id}: {error}") from error


def _render_modes(gymnasium: Any, id: str) -> Sequence[str]:
    try:
        entry = gymnasium.spec(id).entry_point
    except gymnasium.error.Error as error:
        raise ValueError(f"environment.args.id: {error}") from error
    cls = gymnasium.envs.registration.load_env_creator(entry) if isinstance(entry, str) else entry
    modes: Sequence[str] = getattr(cls, "metadata", {}).get("render_modes", ())
    return modes


def _actions(id: str, space: Any) -> range:
    """Raises ValueError where they are not numbered."""
    if not hasattr(space, "n"):
        raise ValueError(f"environment.args.id: the actions of {id} are not numbered: {space}")
    return range(int(space.start), int(space.start + space.n))


def _seen(episode: Any, observation: Any) -> str:
    """The text that it is drawn as, or the observation as Python writes it. What is drawn in colour, such as the place
    of the player, is put in brackets."""
    drawn = episode.render() if episode.render_mode == "ansi" else str(observation)
    return re.sub(r"\x1b\[[0-9;]+m", "[", drawn.replace("\x1b[0m", "]")).strip()

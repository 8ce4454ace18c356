"""An environment of gymnasium (https://gymnasium.farama.org) that can be said in words, as it is: the model acts, turn
by turn, and is paid what the episode pays.

environment:
  name: gym/FrozenLake-v1
  args:
    instruction: "Walk from S to G without falling into H. Answer with left, down, right or up."
    actions: {left: 0, down: 1, right: 2, up: 3}
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_rl.agent.multi_turn import MultiTurnAgent
from megatron_rl.agent.prompts import Chat, asked, in_chat, next_turn
from megatron_rl.agent.trajectories import Problem
from megatron_rl.inference.api import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.section import NonNegativeInt, PositiveInt, Section


class GymConfig(Section):
    """Arguments of the environment `gym`."""

    id: str
    """Registered id of the environment, such as FrozenLake-v1."""
    kwargs: dict[str, Any] = {}
    """Arguments with which gymnasium makes it."""
    actions: dict[str, int] = {}
    """What the model may say, and the action that it means; default: the number of the action."""
    instruction: str = "Answer with the number of your next action."
    """What stands before the first observation."""
    chat: Chat = "auto"
    """always: as a user's message in the tokenizer's chat template. auto: so where it has one. never: as it stands."""
    episodes: PositiveInt = 256
    """Episodes to train on: seeds from 0 on."""
    held_out: NonNegativeInt = 64
    """Episodes of the evaluation set held_out: the seeds after those."""
    max_turns: PositiveInt = 16
    """Actions of an episode at most."""


class GymEnvironment(MultiTurnAgent):
    """An environment of gymnasium with numbered actions, which can be said in words.

    Nothing is kept between turns: an episode is played again from its seed each time, so one that is interrupted goes
    on. An answer that is no action ends it. It runs in the rank's event loop, so a step must be quick.
    """

    Config = GymConfig
    config: GymConfig
    variant_argument = "id"

    def __init__(self, config: GymConfig, tokenizer: Tokenizer) -> None:
        """Raises ValueError where gymnasium is missing, has no such environment, or its actions are not numbered."""
        super().__init__(config, tokenizer)
        self.max_turns = config.max_turns
        numbered = _actions(config)
        if not {*config.actions.values()} <= {*numbered}:
            raise ValueError(f"environment.args.actions: {config.id} has {numbered.start} to {numbered.stop - 1}")
        self._words = config.actions or {str(action): action for action in numbered}
        longest_first = sorted(self._words, key=len, reverse=True)
        self._action = re.compile(rf"\b({'|'.join(map(re.escape, longest_first))})\b", re.IGNORECASE)
        self.prompt_format = "chat template" if in_chat(tokenizer, config.chat) else ""

    def training_problems(self) -> Sequence[Problem]:
        return self._problems(range(self.config.episodes))

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        held_out = range(self.config.episodes, self.config.episodes + self.config.held_out)
        return {"held_out": self._problems(held_out)} if held_out else {}

    def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> str | None:
        said, _, over = self._play(golden["seed"], responses)
        return None if over else next_turn(self.tokenizer, said)

    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> float:
        """The sum of what the actions were paid."""
        return self._play(golden["seed"], responses)[1]

    def _problems(self, seeds: range) -> list[Problem]:
        return [
            Problem(
                asked(self.tokenizer, f"{self.config.instruction}\n{self._play(seed, [])[0]}\n", self.config.chat),
                {"seed": seed},
            )
            for seed in seeds
        ]

    def _play(self, seed: int, responses: Sequence[str]) -> tuple[str, float, bool]:
        """What is seen after these responses, what they were paid, and whether the episode is over."""
        episode = _make(self.config)
        try:
            observation, _ = episode.reset(seed=seed)
            paid, over = 0.0, False
            for response in responses:
                found = self._action.findall(response)
                if over or not found:
                    return "", paid, True
                observation, reward, ended, cut_off, _ = episode.step(self._meant(found[-1]))
                paid, over = paid + float(reward), ended or cut_off
            return _seen(episode, observation), paid, over
        finally:
            episode.close()

    def _meant(self, word: str) -> int:
        return next(action for name, action in self._words.items() if name.lower() == word.lower())


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


def _actions(config: GymConfig) -> range:
    episode = _make(config)
    space = episode.action_space
    episode.close()
    if not hasattr(space, "n"):
        raise ValueError(f"environment.args.id: the actions of {config.id} are not numbered: {space}")
    return range(int(space.start), int(space.start + space.n))


def _seen(episode: Any, observation: Any) -> str:
    """The text that it is drawn as, or the observation as Python writes it. What is drawn in colour, such as the place
    of the player, is put in brackets."""
    drawn = episode.render() if episode.render_mode == "ansi" else str(observation)
    return re.sub(r"\x1b\[[0-9;]+m", "[", drawn.replace("\x1b[0m", "]")).strip()

"""Text-based environments of gymnasium (https://gymnasium.farama.org): the model acts turn by turn, and its reward is
the return of the episode.

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
from megatron_rl.agent.multi_turn import MultiTurnAgent, Reply
from megatron_rl.agent.prompts import PromptConfig, in_chat, prompt_format, render_prompt
from megatron_rl.agent.reward_value import Reward
from megatron_rl.agent.trajectories import Problem
from megatron_rl.generate.engine.interface import FinishReason
from megatron_rl.model.tokenizer import Tokenizer
from megatron_rl.recipe.section import NonNegativeInt, PositiveInt

BY_NUMBER = "Answer with the number of your next action."


class GymConfig(PromptConfig):
    """Arguments of the environment `gym`."""

    id: str
    """Registered id of the environment, such as FrozenLake-v1."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of `gymnasium.make`."""
    actions: dict[str, int] = {}
    """Actions by the word that the model uses for them; default: the number of the action."""
    instruction: str | None = None
    """Text before the first observation. Default: it asks for the name of the next action, one of `actions`, or for its
    number."""
    episodes: PositiveInt = 256
    """Number of training episodes: seeds from 0."""
    held_out: NonNegativeInt = 64
    """Number of episodes of the evaluation set held_out: the seeds after those."""
    max_turns: PositiveInt = 16
    """Largest number of actions of an episode."""
    invalid_action_reward: float = -1.0
    """Reward added if a response names no action, which ends the episode. Choose less than the return of the worst
    episode: otherwise the model learns to avoid it by naming no action."""

    def extras(self) -> list[str]:
        return ["gym"]

    @field_validator("actions")
    @classmethod
    def _are_distinct(cls, actions: dict[str, int]) -> dict[str, int]:
        if "" in actions:
            raise ValueError("an action needs a name of at least one character")
        if len({name.lower() for name in actions}) < len(actions):
            raise ValueError(f"upper and lower case are equal: give distinct names, not {', '.join(actions)}")
        return actions


class EpisodeState(NamedTuple):
    observation: str
    reward: float
    """Sum of the rewards so far."""
    turns: tuple[tuple[float, str | None], ...]
    """Reward of each turn so far, and the observation before it, if it was asked for."""
    over: bool


class GymEnvironment(MultiTurnAgent, Demonstrator):
    """Any text-based environment of gymnasium with numbered actions.

    Rewards are reported by turn, with the observation before each as its key. No state is kept between turns: an
    episode is replayed from its seed each time, so an interrupted episode can continue. A response that names no action
    ends it. Steps run in the rank's event loop, so they must be quick.
    """

    Config = GymConfig
    config: GymConfig
    variant_argument = "id"

    def __init__(self, config: GymConfig, tokenizer: Tokenizer) -> None:
        super().__init__(config, tokenizer)
        self.max_turns = config.max_turns
        self._episode = _make(config)  # shared: making it takes ten times as long as a step
        numbered = _actions(config.id, self._episode.action_space)
        if not {*config.actions.values()} <= {*numbered}:
            raise ValueError(f"environment.args.actions: {config.id} has {numbered.start} to {numbered.stop - 1}")
        self._words = config.actions or {str(action): action for action in numbered}
        longest_first = sorted(self._words, key=len, reverse=True)
        self._action = re.compile("|".join(map(_named, longest_first)), re.IGNORECASE)
        self._meant = [self._words[word] for word in longest_first]
        named = f"Answer with your next action: {', '.join(config.actions)}." if config.actions else BY_NUMBER
        self._instruction = named if config.instruction is None else config.instruction
        self.prompt_format = prompt_format(tokenizer, config)

    def training_problems(self) -> Sequence[Problem]:
        return self._problems(range(self.config.episodes))

    def evaluation_problems(self) -> Mapping[str, Sequence[Problem]]:
        held_out = range(self.config.episodes, self.config.episodes + self.config.held_out)
        return {"held_out": self._problems(held_out)} if held_out else {}

    def demonstrations(self) -> Sequence[tuple[str, str]]:
        """Return random actions, which teach the format and not the task; none if there is a chat template."""
        if self.prompt_format:
            return []
        pairs = []
        for problem in self.training_problems():
            draw, conversation = random.Random(stable_key("gym", problem.golden["seed"])), problem.prompt
            responses: list[str] = []
            over = False
            while not over and len(responses) < self.max_turns:
                responses.append(draw.choice([*self._words]))
                pairs.append((conversation, responses[-1]))
                played = self._play(problem.golden["seed"], responses)
                conversation, over = f"{conversation}{responses[-1]}{_line(played.observation)}", played.over
        return pairs

    def get_observation(self, responses: Sequence[str], golden: Mapping[str, Any]) -> Reply:
        played = self._play(golden["seed"], responses)
        if played.over:
            return None
        if in_chat(self.tokenizer, self.config):
            return [{"role": "user", "content": played.observation}]
        return _line(played.observation)

    def get_trajectory_reward(
        self, responses: Sequence[str], golden: Mapping[str, Any], finish_reason: FinishReason
    ) -> Reward:
        played = self._play(golden["seed"], responses, keyed=True)
        return {
            "reward": played.reward,
            "turn_rewards": [{"reward": reward, "key": key} for reward, key in played.turns],
        }

    def _problems(self, seeds: range) -> list[Problem]:
        return [Problem(self._prompt(self._play(seed, []).observation), {"seed": seed}) for seed in seeds]

    def _prompt(self, observation: str) -> str:
        message = "".join(f"{part}\n" for part in (self._instruction, observation) if part)
        return render_prompt(self.tokenizer, message, self.config)

    def _play(self, seed: int, responses: Sequence[str], *, keyed: bool = False) -> EpisodeState:
        """keyed: whether the turns name the observation before them."""
        episode = self._episode
        observation, _ = episode.reset(seed=seed)
        turns: tuple[tuple[float, str | None], ...] = ()
        total, over = 0.0, False
        for response in responses:
            found = [*self._action.finditer(response)]
            key, invalid = _text(episode, observation) if keyed else None, self.config.invalid_action_reward
            if not found:
                return EpisodeState("", total + invalid, (*turns, (invalid, key)), True)
            observation, reward, ended, cut_off, _ = episode.step(self._meant[(found[-1].lastindex or 0) - 1])
            turns = (*turns, (float(reward), key))
            total, over = total + float(reward), ended or cut_off
        return EpisodeState(_text(episode, observation), total, turns, over)


def _line(observation: str) -> str:
    return f"\n{observation}\n"


def _named(word: str) -> str:
    """Return the pattern of an action's name as a group. An edge that is a word character must be at a word boundary,
    so that `up` does not match inside `upper`."""
    before, after = (r"\b" if re.match(r"\w", edge) else "" for edge in (word[0], word[-1]))
    return f"({before}{re.escape(word)}{after})"


def _make(config: GymConfig) -> Any:
    try:
        import gymnasium  # the launcher, which only checks the arguments, does not have it
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
    if not hasattr(space, "n"):
        raise ValueError(f"environment.args.id: the actions of {id} are not numbered: {space}")
    return range(int(space.start), int(space.start + space.n))


def _text(episode: Any, observation: Any) -> str:
    """Return the rendered text, or the observation as Python prints it. Colored text, such as the player's position, is
    put in brackets."""
    drawn = episode.render() if episode.render_mode == "ansi" else str(observation)
    return re.sub(r"\x1b\[[0-9;]+m", "[", drawn.replace("\x1b[0m", "]")).strip()

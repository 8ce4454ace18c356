"""Protocol between the training ranks and an inference replica: JSON over HTTP. Pure.

    POST /hello    {"driver"}                                  about; forgets earlier requests of this driver
    POST /ask      {"driver", "version", "requests", "cancel"} about
    POST /news     {"driver", "seen", "wait_s"}                about, "last", "pieces", "refused": all after `seen`

Of training rank 0 only:

    POST /start    {}                    begin to start the engine; returns at once
    POST /sleep    {}                    leave the device to the training ranks, once the engine has started;
                                         unfinished answers stay
    POST /receive  {"version", "epoch"}  begin to receive the weights, after joining the group of a new epoch; null:
                                         the same epoch. Returns at once
    POST /swap     {"version", "probe"}  use them, once they are complete; the probe is null or of
                                         `generate/refit/probe.py`
    POST /end      {}                    the run no longer needs the replica

A replica beside training ranks is `down` until its engine has started. Then it is `asleep` until a swap makes it
`awake`, and again after each /sleep, which forgets the version. Only an engine that is asleep receives weights. Other
replicas are always awake, and answer /start and /sleep with HTTP 424.

A log-prob that is not finite is null, since JSON has no number for it; training leaves out such a token and counts it.

Each request carries the run's token, and repeating it changes nothing. All bodies contain PROTOCOL and the digest of
the configuration: a replica of another start of the run, or with other code, refuses them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError, create_model

from megatron_rl.contract.files import read_bytes
from megatron_rl.generate.engine.interface import (
    AnswerPrefix,
    Delta,
    FinishReason,
    GenerationRequest,
    PromptTooLong,
    Unsupported,
)
from megatron_rl.model.choices import Choices, decode_choices, encode_choices
from megatron_rl.recipe.errors import ConfigurationError
from megatron_rl.recipe.inference import Sampling

PROTOCOL = 10
FEWEST_CHARACTERS = 32

Body = Mapping[str, Any]

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
"""Strictness of decoding: a number in quotes would be compared with numbers somewhere in the run."""
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
PolicyVersion = Annotated[int, Field(ge=-1, lt=2**63)]
MOST_SAMPLES = 2**16
LONGEST_WAIT_S = 600.0

State = Literal["awake", "asleep", "down"]

OTHER_VERSION = "other version"
"""Kind of a refusal: the weights are older than the request allows."""
_KINDS: dict[str, type[Exception]] = {
    "prompt too long": PromptTooLong,
    "unsupported": Unsupported,
    "value": ValueError,
}
REFUSED = tuple(_KINDS.values())
"""Errors of the request itself, which every other replica would raise too."""


class Garbled(ValueError):
    """A body violates the protocol."""


@dataclass(frozen=True, slots=True)
class About:
    """State of a replica, part of every response."""

    replica: int
    start: int
    ranks: int
    version: PolicyVersion | None
    """Policy version of its weights; None before the first ones, and while it is not awake."""
    running: int
    """Samples being decoded, of all drivers."""
    waiting: int
    cache_used: float
    """Share of its cache of keys and values that is in use, from 0 to 1."""
    preemptions: int
    """Samples that lost their cache to others since its start, and were computed again."""
    busy_s: float
    """Seconds that its engine has computed so far."""
    state: State = "awake"
    rested_s: float = 0.0
    """Seconds in which it was not awake so far."""
    sampled: int = 0
    """Tokens that it has sampled for its drivers so far."""
    drafted: int = 0
    """Tokens that speculative decoding has drafted so far; 0 without it."""
    accepted: int = 0
    """Drafted tokens that became tokens of answers."""


class Refusal(NamedTuple):
    request_id: str
    kind: str
    message: str

    @property
    def error(self) -> Exception:
        return _KINDS.get(self.kind, ValueError)(self.message)


class News(NamedTuple):
    about: About
    last: int
    """Number of the newest item."""
    pieces: list[tuple[str, Delta]]
    refused: list[Refusal]


def digest_of(resolved: Path) -> str:
    """Return the digest of a rank's configuration. Raises OSError."""
    return hashlib.sha256(read_bytes(resolved)).hexdigest()


def read_token(file: Path) -> str:
    """Return the token in the first line of a file. Raises ConfigurationError."""
    try:
        token = read_bytes(file).decode("ascii").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the token {file} cannot be read: {error}") from error
    if len(token) < FEWEST_CHARACTERS or not token.isprintable() or " " in token:
        raise ConfigurationError(
            f"{file} holds no token: its first line must have {FEWEST_CHARACTERS} characters or more"
        )
    return token


def kind_of(error: Exception) -> str:
    return next(name for name, kind in _KINDS.items() if isinstance(error, kind))


def encode_request(request: GenerationRequest) -> dict[str, Any]:
    return {
        "id": request.id,
        "prompt": request.prompt_tokens,
        "samples": request.num_samples,
        "sampling": request.sampling.model_dump(),
        "key": request.key,
        "ordinal": request.ordinal,
        "grammar": request.grammar,
        "known": {str(sample): _known(prefix) for sample, prefix in request.known.items()},
    }


class Received(BaseModel):
    """Base of bodies that are decoded. Others of a body's keys belong to other readers."""

    model_config = STRICT | ConfigDict(extra="ignore")


class AskBody(Received):
    version: PolicyVersion
    requests: list[Any]
    cancel: list[str]


class NewsBody(Received):
    seen: NonNegativeInt
    wait_s: Annotated[float, Field(ge=0, le=LONGEST_WAIT_S)]


class ReceiveBody(Received):
    version: PolicyVersion
    epoch: dict[str, Any] | None


class SwapBody(Received):
    version: PolicyVersion
    probe: dict[str, Any] | None


AnyReceived = TypeVar("AnyReceived", bound=Received)


def decode(kind: type[AnyReceived], body: Any, what: str) -> AnyReceived:
    """Decode a body. Raises Garbled. what: names it, for errors."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"{part}: " for part in first["loc"])
        raise Garbled(f"{what}: {place}{first['msg']}") from error


def encode_logprobs(logprobs: list[float]) -> list[float] | list[float | None]:
    if math.isfinite(sum(logprobs)):  # far faster than a look at each of them
        return logprobs
    return [each if math.isfinite(each) else None for each in logprobs]


def decode_logprobs(logprobs: list[float | None]) -> list[float]:
    return [-math.inf if each is None else each for each in logprobs]


class _Prefix(NamedTuple):
    tokens: list[TokenId]
    logprobs: list[float | None]
    versions: list[PolicyVersion]
    choices: list[Any] = []  # never changed in place


class _RequestBody(Received):
    id: str
    prompt: list[TokenId]
    samples: Annotated[int, Field(le=MOST_SAMPLES)]
    sampling: Sampling
    key: int
    ordinal: int | None
    grammar: str
    known: dict[str, _Prefix]


def decode_request(body: Any) -> GenerationRequest:
    """Raises Garbled."""
    asked = decode(_RequestBody, body, "a request")
    try:
        known = {int(sample): _answer_prefix(its) for sample, its in asked.known.items()}
        if known and not 0 <= min(known) <= max(known) < asked.samples:
            raise ValueError(f"known tokens of a sample that is none of {asked.samples}")
        return GenerationRequest(
            prompt_tokens=asked.prompt,
            num_samples=asked.samples,
            sampling=asked.sampling,
            key=asked.key,
            ordinal=asked.ordinal,
            grammar=asked.grammar,
            known=known,
            id=asked.id,
        )
    except (TypeError, ValueError) as error:
        raise Garbled(f"a request: {error}") from error


def encode_news(news: News) -> dict[str, Any]:
    """Encode news. Answers to one prompt in one message share its choices of experts."""
    pieces: list[list[Any]] = []
    first: dict[str, Choices] = {}  # of each request, the first choices in the message
    for name, each in news.pieces:
        end = (each.finish_reason, each.stop)
        pieces.append([name, each.sample, each.tokens, encode_logprobs(each.logprobs), each.versions, *end])
        if each.choices:
            pieces[-1].append(encode_choices(each.choices, first.get(name, [])))
            first.setdefault(name, each.choices)
    return {"about": asdict(news.about), "last": news.last, "pieces": pieces, "refused": news.refused}


class _Piece(NamedTuple):
    request: str
    sample: int
    tokens: list[TokenId]
    logprobs: list[float | None]
    versions: list[PolicyVersion]
    finish_reason: FinishReason | None
    stop: str | None
    choices: list[Any] = []  # never changed in place


class _Told(Received):
    last: NonNegativeInt
    pieces: list[_Piece]
    refused: list[Refusal]


def decode_news(body: Body) -> News:
    """Raises Garbled."""
    told = decode(_Told, body, "news")
    pieces = []
    first: dict[str, Choices] = {}
    try:
        for each in told.pieces:
            if not len(each.tokens) == len(each.logprobs) <= len(each.versions):
                raise ValueError("every token needs a log-prob and a version")
            choices: Choices = []
            if each.choices:
                choices = decode_choices(each.choices, first.get(each.request, []))
                first.setdefault(each.request, choices)
            lists = each.tokens, decode_logprobs(each.logprobs), each.versions
            delta = Delta(each.sample, *lists, finish_reason=each.finish_reason, stop=each.stop, choices=choices)
            pieces.append((each.request, delta))
    except ValueError as error:
        raise Garbled(f"news: {error}") from error
    return News(decode_about(body), told.last, pieces, told.refused)


def _known(prefix: AnswerPrefix) -> list[Any]:
    choices = [encode_choices(prefix.choices)] if prefix.choices else []
    return [prefix.tokens, encode_logprobs(prefix.logprobs), prefix.versions, *choices]


def _answer_prefix(its: _Prefix) -> AnswerPrefix:
    choices = decode_choices(its.choices) if its.choices else []
    return AnswerPrefix(its.tokens, decode_logprobs(its.logprobs), its.versions, choices)


_TYPES = get_type_hints(About, include_extras=True)
_FIELDS: Any = {
    each.name: (_TYPES[each.name], ... if each.default is MISSING else each.default) for each in fields(About)
}
_About = create_model("_About", __base__=Received, **_FIELDS)  # pydantic takes only instances of a strict dataclass


def decode_about(body: Body) -> About:
    """Raises Garbled."""
    found: Any = decode(_About, body.get("about"), "about")
    return About(**found.__dict__)

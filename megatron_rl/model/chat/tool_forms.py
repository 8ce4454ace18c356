"""Calls and definitions of tools in the forms that published data sets use. Functions raise ConversationError."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from megatron_rl.contract.bounded_json import bounded_json
from megatron_rl.model.chat.messages import ConversationError, Tool

MOST_ITEMS = 10_000
"""Messages of a conversation, parts of a message, calls or tools: a server reads them while other requests wait."""
CALL_WITHOUT_MEANING = {
    "cache_control": "advice to a cache",
    "extra_content": "notes of another provider",
    "index": "number of a streamed call, which some clients send back",
    "provider_specific_fields": "notes of another provider",
}
"""Keys of a call that are ignored, since they do not change what is said. Key -> reason."""
TOOL_WITHOUT_MEANING = {
    "cache_control": "advice to a cache",
    "strict": "a rule for the sampler; a model that chooses whether to call may violate the schema all the same",
}
"""Keys of a tool that are ignored. Key -> reason."""
RESULT_KEYS = ("return", "returns", "response")
"""Names under which sets describe what a tool returns; templates that write a whole tool write them."""


def parsed_json(text: str, place: str) -> Any:
    try:
        return bounded_json(text)
    except ValueError as error:
        raise ConversationError(place, f"is not JSON: {error}") from error


def kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "a boolean"
    for types, name in (
        (str, "a text"),
        ((int, float), "a number"),
        (Mapping, "an object"),
        (Sequence, "a list"),
        (type(None), "null"),
    ):
        if isinstance(value, types):
            return name
    return f"a {type(value).__name__}"


def said(given: Mapping[Any, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if value is not None}


def items_of(given: object, place: str, what: str) -> Sequence[Any]:
    """Return the items of a list.

    what: name of the items, for errors.
    """
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise ConversationError(place, f"is {kind_of(given)}, not a list of {what}")
    if len(given) > MOST_ITEMS:
        raise ConversationError(place, f"has {len(given)} {what}; at most {MOST_ITEMS} can be read")
    return given


def calls_of(given: object, place: str) -> list[dict[str, Any]]:
    """Return the calls of a message in OpenAI's form with objects as arguments.

    given: a list of calls, one call, or the JSON text of either.
    """
    if isinstance(given, str):
        given = parsed_json(given, place) if given.strip() else []
    if isinstance(given, Mapping):
        return [call_of(given, place)]
    return [call_of(each, f"{place}.{number}") for number, each in enumerate(items_of(given, place, "calls"))]


def call_of(given: object, place: str) -> dict[str, Any]:
    """Return one call: {"id", "type", "function": {...}}, or a flat {"name", "arguments"}."""
    fields = _fields(given, place, "a call with a name and arguments", CALL_WITHOUT_MEANING)
    identity = fields.pop("id", None)
    if identity is not None and not isinstance(identity, str):
        raise ConversationError(f"{place}.id", f"is {kind_of(identity)}, not a text")
    found, inside = _function(fields, place, "an object with a name and arguments")
    name = _name(found.pop("name", None), inside)
    key = "parameters" if "parameters" in found and "arguments" not in found else "arguments"
    arguments = arguments_of(found.pop(key, None), f"{inside}.{key}")
    _refuse_unknown(found, inside)
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if identity is None else {"id": identity, **call}


def _fields(given: object, place: str, what: str, ignored: Collection[str]) -> dict[str, Any]:
    """Return the fields of a call or a tool, which may be its JSON text, without its type. what: for errors."""
    if isinstance(given, str):
        given = parsed_json(given, place)
    if not isinstance(given, Mapping):
        raise ConversationError(place, f"is {kind_of(given)}, not {what}")
    fields = {name: value for name, value in said(given).items() if name not in ignored}
    kind = fields.pop("type", "function")
    if kind != "function":
        raise ConversationError(f"{place}.type", f"is {str(kind)[:50]!r}; only functions are known")
    return fields


def _function(
    fields: dict[str, Any], place: str, what: str, ignored: Collection[str] = ()
) -> tuple[dict[str, Any], str]:
    """Return the fields of the function, which are those given or stand one level below, and their place."""
    if "function" not in fields:
        return fields, place
    function, inside = fields.pop("function"), f"{place}.function"
    _refuse_unknown(fields, place)
    if not isinstance(function, Mapping):
        raise ConversationError(inside, f"is {kind_of(function)}, not {what}")
    return {name: value for name, value in said(function).items() if name not in ignored}, inside


def arguments_of(given: object, place: str) -> dict[str, Any]:
    """Return the arguments of a call, which are an object, its JSON text, or left out."""
    if isinstance(given, str):
        given = parsed_json(given, place) if given.strip() else {}
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConversationError(place, f"are {kind_of(given)}, not an object")
    return checked_json(dict(given), place)


def checked_json(value: Any, place: str) -> Any:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ConversationError(place, f"cannot be written as JSON: {error}") from error
    return value


def tools_of(given: object, place: str = "tools") -> tuple[Tool, ...]:
    """Return the definitions of tools in OpenAI's form.

    given: a list of tools, one tool, or the JSON text of either; the items of a list may be JSON texts. A tool is
    OpenAI's, or a bare function with name, description and parameters.
    """
    if isinstance(given, str):
        given = parsed_json(given, place) if given.strip() else []
    if given is None:
        return ()
    if isinstance(given, Mapping):
        given = [given]
    return tuple(_tool(each, f"{place}.{number}") for number, each in enumerate(items_of(given, place, "tools")))


def _tool(given: object, place: str) -> Tool:
    fields = _fields(given, place, "a tool with a name and parameters", TOOL_WITHOUT_MEANING)
    fields, inside = _function(fields, place, "an object with a name and parameters", TOOL_WITHOUT_MEANING)
    found: dict[str, Any] = {"name": _name(fields.pop("name", None), inside)}
    if "description" in fields:
        found["description"] = fields.pop("description")
        if not isinstance(found["description"], str):
            raise ConversationError(f"{inside}.description", f"is {kind_of(found['description'])}, not a text")
    key = "input_schema" if "input_schema" in fields and "parameters" not in fields else "parameters"
    found["parameters"] = arguments_of(fields.pop(key, None), f"{inside}.{key}")
    found |= {name: fields.pop(name) for name in RESULT_KEYS if name in fields}
    _refuse_unknown(fields, inside)
    return {"type": "function", "function": checked_json(found, inside)}


def _name(given: object, place: str) -> str:
    if not isinstance(given, str) or not given:
        what = "is missing" if given in (None, "") else f"is {kind_of(given)}, not a text"
        raise ConversationError(f"{place}.name", what)
    return given


def _refuse_unknown(fields: Mapping[str, Any], place: str) -> None:
    for name in fields:
        raise ConversationError(f"{place}.{name}", "is not known here; leave it out")

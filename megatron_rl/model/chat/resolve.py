"""The format of a tokenizer's conversations: a renderer of the library if one is proven equal to the chat template."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from megatron_rl.model.chat.formats import ConversationFormat, call_markup
from megatron_rl.model.chat.library import LibraryFormat, renderer_names
from megatron_rl.model.chat.probes import CONVERSATIONS, OPENINGS, TOOL, USER, ProbeConversation, calling
from megatron_rl.model.chat.template import TemplateFormat
from megatron_rl.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

THINKING = "enable_thinking"
"""Template variable whose default differs between models of one family, and which a renderer may set otherwise."""


def format_of(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> ConversationFormat:
    """Return the format of a tokenizer with a chat template.

    Raises ValueError if the recipe names a renderer that does not fit the tokenizer, or variables that the template
    cannot have.
    """
    asked = tokenizer.renderer
    if asked not in ("auto", "template") and asked not in renderer_names():
        raise ValueError(
            f"tokenizer.renderer: unknown renderer {asked!r}; give auto, template or one of "
            f"{', '.join(sorted(renderer_names()))}"
        )
    name = _identified(tokenizer) if asked == "auto" else asked
    if name == "template":
        return TemplateFormat(tokenizer, variables)
    if found := _library(tokenizer, name, variables):
        return found
    if asked == "auto":
        logger.info(
            "with chat_template %s the renderer %s writes other prompts than the chat template, which is used instead",
            dict(variables), name,
        )  # fmt: skip
        return TemplateFormat(tokenizer, variables)
    form = LibraryFormat(tokenizer, name, variables)
    logger.warning(
        "tokenizer.renderer %s writes other tokens than the chat template in %s", name,
        _difference(form, tokenizer, variables, CONVERSATIONS) or "no conversation that was tried",
    )  # fmt: skip
    return _with_calls(form, tokenizer)


@lru_cache(maxsize=8)
def _identified(tokenizer: Tokenizer) -> str:
    for name in renderer_names():
        for variables in ({}, {THINKING: True}, {THINKING: False}):
            try:
                form = LibraryFormat(tokenizer, name, variables)
            except ValueError:
                break
            if _difference(form, tokenizer, variables, CONVERSATIONS) is None:
                logger.info("conversations: the renderer %s reproduces the chat template", name)
                return name
    logger.info("conversations: no renderer reproduces the chat template, which is used by itself")
    return "template"


def _library(tokenizer: Tokenizer, name: str, variables: Mapping[str, Any]) -> LibraryFormat | None:
    """Return a renderer that begins conversations as the template does with these variables; None if it differs.

    Later turns are compared without variables: with `enable_thinking: false` some renderers keep the empty thought of
    earlier answers, which the model has seen and a new rendering would leave out.
    """
    guesses: Sequence[Mapping[str, Any]] = [{}] if THINKING in variables else [{}, {THINKING: False}, {THINKING: True}]
    for guess in guesses:
        try:
            form = LibraryFormat(tokenizer, name, {**guess, **variables})
        except ValueError:
            continue
        if _difference(form, tokenizer, variables, OPENINGS) is None:
            return _with_calls(form, tokenizer)
    return None


def _with_calls(form: LibraryFormat, tokenizer: Tokenizer) -> LibraryFormat:
    """Note how the format writes calls, if it reads back a call that it has written."""
    try:
        asked = form.rendered(ProbeConversation("", [USER], [TOOL]))
        called = form.rendered(ProbeConversation("", [USER, calling()], [TOOL]))
    except Exception:  # noqa: BLE001 - a renderer without tools may raise anything
        return form
    same = next((n for n, pair in enumerate(zip(asked, called, strict=False)) if pair[0] != pair[1]), len(asked))
    ends = [n for n, token in enumerate(called[same:]) if token in form.stop_ids]
    markup = call_markup(tokenizer, form.renderer, called[same:][: ends[0] if ends else None], [TOOL])
    form.calls = markup[0] if markup else None
    return form


def _difference(
    form: LibraryFormat, tokenizer: Tokenizer, variables: Mapping[str, Any], probes: Sequence[ProbeConversation]
) -> str | None:
    """Return the name of the first conversation that renderer and template write differently. Conversations that the
    template refuses do not count, except the first."""
    for number, probe in enumerate(probes):
        try:
            text = tokenizer.conversation(list(probe.messages), list(probe.tools) or None, {**form.date, **variables})
        except ValueError:
            if number == 0:
                return probe.name
            continue
        assert text is not None  # there is a template
        try:
            same = form.rendered(probe) == tokenizer.encode(text)
        except Exception:  # noqa: BLE001 - a renderer may raise anything
            same = False
        if not same:
            return probe.name
    return None

"""Recipe keys of conversations."""

from __future__ import annotations

from typing import Any

from megatron_rl.recipe.section import Section


class ChatConfig(Section):
    """Arguments of every environment that can speak in the model's chat template."""

    chat_template: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking: false`; default: the template's own."""

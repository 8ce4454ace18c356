"""Harness of verifiers that asks the model inside the worker: the conversation, and the tools that the task serves.

verifiers' own `null` harness does the same in a separate program, which it installs with uv and starts for each turn
of a user. That takes a second of a core each time, and a network at the first; a compute node often has none.
"""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

import httpx
from verifiers.v1 import Harness, HarnessConfig, ProgramResult
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

__all__ = ["ChatHarness"]

DONE = ProgramResult(exit_code=0, stdout="", stderr="")
TOO_LONG = ("context_length_exceeded", "maximum context length")
"""Marks of a refusal because the conversation has no room for another answer, which ends it cleanly."""


class ChatHarnessConfig(HarnessConfig):
    """Configuration of the harness: that of every harness."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Asks the model until an answer calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: dict[str, str], data: Any
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            # verifiers serves the endpoint on this machine: no proxy, no certificates, and rollouts have limits.
            client = await stack.enter_async_context(httpx.AsyncClient(verify=False, trust_env=False, timeout=None))
            schemas, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, **({"tools": schemas} if schemas else {})}
            while True:
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json={**body, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if answer.status_code != httpx.codes.OK:
                    if any(mark in answer.text for mark in TOO_LONG):
                        return DONE
                    return ProgramResult(exit_code=1, stdout="", stderr=f"{answer.status_code}: {answer.text}")
                message = answer.json()["choices"][0]["message"]
                messages.append({name: value for name, value in message.items() if value is not None})
                if not message.get("tool_calls"):
                    return DONE
                for call in message["tool_calls"]:
                    content = await _call(call["function"], dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _call(function: dict[str, Any], dispatch: dict[str, tuple[str, str]], connections: dict[str, Any]) -> Any:
    name = function["name"]
    if name not in dispatch:
        return f"error: unknown tool {name!r}"
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except json.JSONDecodeError as error:
        return f"error: the arguments are not valid JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments must be a JSON object"
    return await call_mcp(connections, dispatch, name, arguments)

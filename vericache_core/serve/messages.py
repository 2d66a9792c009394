"""Messages and tools of a chat, as clients of the OpenAI API send them -> as chat templates take them."""

from __future__ import annotations

import json
from typing import Any

from vericache_core.errors import PromptError, UsageError


def read_messages(given: Any, *, calls: bool) -> list[dict[str, Any]]:
    """Messages of text; with ``calls`` those that call tools and those that answer, too.

    Raises:
        PromptError: not messages, or something in them that this model does not read.
    """
    if not isinstance(given, list) or not given:
        raise PromptError("messages is to be a list of at least one message")
    return [_message(f"messages[{number}]", message, calls) for number, message in enumerate(given)]


def read_tools(given: list[Any]) -> list[dict[str, Any]]:
    """Functions that may be called.

    Raises:
        UsageError: one is no function, has no name, or asks for what is not promised here.
    """
    return [_tool(f"tools[{number}]", tool) for number, tool in enumerate(given)]


def tool_name(tool: dict[str, Any]) -> str:
    """Of a tool that was read."""
    name: str = tool["function"]["name"]
    return name


def _message(where: str, message: Any, calls: bool) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise PromptError(f"{where} is to be an object with a role")
    role, given = message["role"], {name: value for name, value in message.items() if value}
    own = {"assistant": {"tool_calls"}, "tool": {"tool_call_id"}}.get(role, set()) if calls else set()
    further = set(given) - {"role", "content", "name"} - own
    if further:
        raise PromptError(f"{where}: {min(further)} is not served", hint="role and content are")
    called = given.get("tool_calls")
    read: dict[str, Any] = {"role": role}
    # Who calls a tool may say nothing else. Some templates take no null for that.
    read["content"] = "" if called and "content" not in given else _content(where, message.get("content"))
    if called:
        if not isinstance(called, list):
            raise PromptError(f"{where}: tool_calls is to be a list")
        read["tool_calls"] = [_call(f"{where}: tool_calls[{number}]", call) for number, call in enumerate(called)]
    if role == "tool":
        read |= {name: given[name] for name in ("tool_call_id", "name") if name in given}
    return read


def _call(where: str, call: Any) -> dict[str, Any]:
    """A call; its arguments come as text and templates take the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise PromptError(f"{where} is to have a function with a name")
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"{where}: arguments are no JSON", cause=str(error)) from None
    if not isinstance(arguments, dict):
        raise PromptError(f"{where}: arguments are to be a JSON object", hint="as text, as an answer has them")
    named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**named, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool(where: str, tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError(f"{where} is to be a function with a name", hint='{"type": "function", "function": {"name": ...}}')
    if not isinstance(function.get("parameters", {}), dict):
        raise UsageError(f"{where}: parameters is to be a JSON schema")
    if function.get("strict"):
        raise UsageError(f"{where}: strict is not served", cause="no grammar holds the model to a schema", hint="leave it out")
    return {"type": "function", "function": {name: value for name, value in function.items() if name != "strict"}}


def _content(where: str, content: Any) -> str:
    """Text, or parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PromptError(f"{where}: content is to be text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise PromptError(f"{where}: a part of the content is no text", hint="this model reads text alone")
    return "".join(part["text"] for part in content)

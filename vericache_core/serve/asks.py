"""Bodies of calls of the OpenAI API -> prompts and sampling parameters; what cannot be done is refused by name.

A field that would change the answer and is not served must not be overlooked: a client that asked for JSON and gets
prose has been lied to. ``null`` counts as not given, as clients send it for that.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from vericache_core.errors import PromptError, UsageError
from vericache_core.model.prompts import Chat
from vericache_core.plugins.fields import did_you_mean
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.serve.dialect import Dialect
from vericache_core.serve.grammar import Grammars
from vericache_core.serve.messages import read_messages, read_tools, tool_name
from vericache_core.serve.tool_calls import CallReader

MOST_PROMPTS: Final = 256
"""Prompts of one call of ``/v1/completions``, each as often as ``n`` says."""
MOST_CHOICES: Final = 128
"""Of one prompt."""
MOST_LOGPROBS: Final = 20
"""Likeliest tokens beside each one."""
_SAMPLING: Final = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    **{
        name: name
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "stop_token_ids",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "ignore_eos",
        )
    },
}
"""Field of the API (those of vLLM beyond OpenAI's too) -> sampling parameter."""
_ABOUT_THE_CALLER: Final = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
_NO_TOOLS: Final = "describe tools in the system message and read the text"
_OLD_TOOLS: Final = "tools and tool_choice are"
_ONE: Final = "n gives several choices; which is best is yours to say"
_NOT_SERVED: Final[Mapping[str, tuple[tuple[Any, ...], str]]] = {
    "best_of": ((1,), _ONE),
    "echo": ((False,), "the prompt is yours already"),
    "suffix": (("",), "put it into the prompt"),
    "logit_bias": (({},), "Engine.generate takes bad_words and logits processors"),
    "tool_choice": (("none", "auto"), "'auto', and say in a message that the tool is to be called"),
    "parallel_tool_calls": ((True,), "take the first call"),
    "functions": (([],), _OLD_TOOLS),
    "function_call": (("none", "auto"), _OLD_TOOLS),
}
"""What is refused: values that ask for nothing, which are let through, and what to do instead."""
_OWN: Final = ("model", "stream", "stream_options", "priority", "compressor")
_FORM: Final = ("tools", "n", "logprobs", "top_logprobs", "response_format")


class UnknownModelError(UsageError):
    """A call names another model than the one that is served."""


@dataclass(frozen=True)
class Ask:
    """One call.

    Attributes:
        chat: of ``/v1/chat/completions``.
        prompts: one for a chat; as :meth:`Engine.submit` takes them.
        params: of the first choice of each.
        plain: decode with the full KV alone.
        priority: higher goes first.
        stream, usage: send pieces, and the count of tokens behind them.
        reader: makes what tells calls of tools from the text of an answer; None without tools.
        n: choices for each prompt.
    """

    chat: bool
    prompts: tuple[Any, ...]
    params: SamplingParams
    plain: bool
    priority: int
    stream: bool
    usage: bool
    reader: Callable[[], CallReader] | None = None
    n: int = 1

    def requests(self) -> Iterator[tuple[Any, SamplingParams]]:
        """What the engine is to do for each choice: those of the first prompt, then those of the next.

        Choices of a prompt differ in their seeds, which count up: one call for each would give the same.
        """
        each = [dataclasses.replace(self.params, seed=(self.params.seed + number) % 2**64) for number in range(self.n)]
        return itertools.product(self.prompts, each)


def read_ask(
    body: Any, *, chat: bool, model: str, defaults: SamplingParams, compressor: str | None, dialect: Dialect, grammars: Grammars
) -> Ask:
    """What a call asks for.

    Args:
        body: parsed JSON.
        chat: it came to ``/v1/chat/completions``.
        model: the name that is served.
        defaults: of what the call leaves out.
        compressor: that drafts here; a call may name it, or ``"none"``.
        dialect: in which the model calls tools.
        grammars: of the model's vocabulary.

    Raises:
        UsageError: unknown, of a wrong type, or not served; the message names the field.
    """
    if not isinstance(body, dict):
        raise UsageError("the body is to be a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    subject = "messages" if chat else "prompt"
    _refuse(given, subject)
    named = given.get("model", model)
    if named != model:
        raise UnknownModelError(f"there is no model {named!r} here", hint=f"this one serves {model!r}")
    if subject not in given:
        raise PromptError(f"{subject} is missing")
    tools = _tools(given, chat, dialect)
    prompts = (_chat(given["messages"], tools, dialect),) if chat else _prompts(given["prompt"])
    stream, options = _typed(given, "stream", bool, False), _typed(given, "stream_options", dict, {})
    return Ask(
        chat,
        prompts,
        _with_form(given, dataclasses.replace(_params(given, defaults), logprobs=_logprobs(given, chat)), chat, grammars),
        _plain(given.get("compressor", compressor), compressor),
        _typed(given, "priority", int, 0),
        stream,
        stream and options.get("include_usage") is True,
        _reader(tools, dialect),
        _choices(given, len(prompts)),
    )


def _refuse(given: Mapping[str, Any], subject: str) -> None:
    known = {subject, *_OWN, *_FORM, *_SAMPLING, *_ABOUT_THE_CALLER, *_NOT_SERVED}
    for name, value in given.items():
        if name not in known:
            near = did_you_mean(name, known)
            raise UsageError(f"unknown field {name!r}" + (f"; did you mean {near!r}?" if near else ""))
        neutral, instead = _NOT_SERVED.get(name, ((value,), ""))
        if not any(type(value) is type(harmless) and value == harmless for harmless in neutral):
            raise UsageError(f"{name} is not served", hint=instead)


def _params(given: Mapping[str, Any], defaults: SamplingParams) -> SamplingParams:
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise UsageError("max_tokens and max_completion_tokens are both given", hint="give only one of them")
    own = {_SAMPLING[name]: value for name, value in given.items() if name in _SAMPLING}
    params = dataclasses.replace(defaults, **own)
    if params.greedy or "seed" in given:
        return params
    # Who samples without naming a seed expects another answer each time.
    return dataclasses.replace(params, seed=secrets.randbits(63))


def _with_form(given: Mapping[str, Any], params: SamplingParams, chat: bool, grammars: Grammars) -> SamplingParams:
    """``params`` that hold the answer to the form that is asked for."""
    form = _typed(given, "response_format", dict, {"type": "text"})
    if form == {"type": "text"}:
        return params
    if not chat or given.get("tools"):
        raise UsageError("response_format is not served", cause="only a chat without tools has it")
    if params.ignore_eos or params.min_new_tokens:
        raise UsageError("response_format ends answers itself", hint="leave ignore_eos and min_tokens out")
    schema: Any = {"type": "object"} if form == {"type": "json_object"} else None
    if form.get("type") == "json_schema" and isinstance(form.get("json_schema"), dict):
        schema = form["json_schema"].get("schema")
    if not isinstance(schema, dict):
        raise UsageError("response_format is to be text, json_object, or json_schema with a schema")
    return dataclasses.replace(params, logits_processors=(*params.logits_processors, grammars.json(schema)))


def _logprobs(given: Mapping[str, Any], chat: bool) -> int | None:
    """Likeliest tokens that are wanted beside each one; None without log probabilities. The two endpoints ask differently."""
    if not chat:
        if "top_logprobs" in given:
            raise UsageError("top_logprobs is not served", hint="a completion has logprobs, a number")
        return None if given.get("logprobs", False) is False else _number(given, "logprobs", 0, MOST_LOGPROBS)
    wanted, top = _typed(given, "logprobs", bool, False), _number(given, "top_logprobs", 0, MOST_LOGPROBS)
    if top and not wanted:
        raise UsageError("top_logprobs without logprobs", hint="logprobs: true")
    return top if wanted else None


def _choices(given: Mapping[str, Any], prompts: int) -> int:
    n = _number(given, "n", 1, MOST_CHOICES)
    if n * prompts > MOST_PROMPTS:
        raise UsageError(f"{prompts} prompts and n={n} make {n * prompts} choices", hint=f"at most {MOST_PROMPTS} in one call")
    return n


def _number(given: Mapping[str, Any], name: str, least: int, most: int) -> int:
    """A number that is ``least`` unless it is given."""
    number: int = _typed(given, name, int, least)
    if not least <= number <= most:
        raise UsageError(f"{name} is to be {least} to {most}, not {number}")
    return number


def _plain(named: Any, compressor: str | None) -> bool:
    if named == "none":
        return True
    if named != compressor:
        raise UsageError(
            f"compressor {named!r} does not draft here", hint=f"leave it out, or {compressor or 'none'!r} or 'none'"
        )
    return False


def _typed(given: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = given.get(name, default)
    if type(value) is not kind:  # True is no priority
        raise UsageError(f"{name} is to be of type {kind.__name__}, not {value!r}")
    return value


def _prompts(given: Any) -> tuple[Any, ...]:
    """Text, token ids, or a list of these."""
    many = given if isinstance(given, list) and given and all(isinstance(part, (str, list)) for part in given) else [given]
    if len(many) > MOST_PROMPTS:
        raise PromptError(f"{len(many)} prompts in one call", hint=f"at most {MOST_PROMPTS}")
    return tuple(many)


def _tools(given: Mapping[str, Any], chat: bool, dialect: Dialect) -> list[dict[str, Any]]:
    """Tools that may be called; of those that may not the model is told nothing."""
    asked = _typed(given, "tools", list, [])
    if not asked:
        return []
    if not chat:
        raise UsageError("tools is not served", cause="a completion has no messages", hint="/v1/chat/completions has them")
    if dialect.reader is None:
        raise UsageError("tools is not served", cause=dialect.name, hint=_NO_TOOLS)
    tools = read_tools(asked)
    return [] if given.get("tool_choice") == "none" else tools


def _chat(messages: Any, tools: list[dict[str, Any]], dialect: Dialect) -> Chat:
    return Chat(read_messages(messages, calls=dialect.reader is not None), tools or None)


def _reader(tools: list[dict[str, Any]], dialect: Dialect) -> Callable[[], CallReader] | None:
    if not tools or dialect.reader is None:
        return None
    return partial(dialect.reader, [tool_name(tool) for tool in tools])

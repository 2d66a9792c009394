"""Prompts of any accepted form -> token ids, and the ids that end a sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from vericache_core.errors import PromptError, describe

if TYPE_CHECKING:
    from typing_extensions import TypeIs


@dataclass(frozen=True)
class Chat:
    """Messages with what else a chat template takes: a prompt like any other.

    Attributes:
        messages: as the template takes them: calls of tools with arguments as objects, not as text.
        tools: functions that the model may call, as JSON schemas; None for none.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


Prompt = str | Sequence[int] | Sequence[Mapping[str, str]] | Chat
Spans = tuple[tuple[int, int], ...]


def is_single_prompt(prompts: Prompt | Sequence[Prompt]) -> TypeIs[Prompt]:
    """Whether ``prompts`` is one prompt (text, token ids, chat) rather than a list of prompts."""
    if isinstance(prompts, str | Chat):
        return True
    first = next(iter(prompts), None)
    return isinstance(first, int | Mapping)


def encode_prompt(prompt: Any, tokenizer: Any, vocab_size: int) -> tuple[list[int], Spans]:
    """Token ids of a prompt, and the spans of it that compressors must keep.

    A chat is rendered with the model's template; what comes before the first user message (system prompt
    and template prefix) is protected. Text gets the tokenizer's special tokens; ids are taken as they are.

    Raises:
        PromptError: empty, of a wrong type, out of the vocabulary, or text without a tokenizer.
    """
    protected: Spans = ()
    if isinstance(prompt, str):
        ids = _text(prompt, tokenizer)
    elif isinstance(prompt, Chat):
        ids, protected = _chat(prompt, tokenizer)
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(part, Mapping) for part in prompt):
        ids, protected = _chat(Chat(prompt), tokenizer)
    elif isinstance(prompt, Sequence) and all(isinstance(part, int) and not isinstance(part, bool) for part in prompt):
        ids = list(prompt)
    else:
        raise PromptError(f"a prompt is text, a chat or token ids, not {type(prompt).__name__}")
    if not ids:
        raise PromptError("the prompt is empty", hint="give at least one token")
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise PromptError(f"token id {bad} is outside the vocabulary of {vocab_size}")
    return ids, protected


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """Text -> token ids without special tokens, for text that is no prompt of its own; None without a tokenizer."""
    if tokenizer is None:
        return None

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return encode


def _text(prompt: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise PromptError("text prompts need a tokenizer", hint="give token ids")
    _check_unicode(prompt)
    ids: list[int] = tokenizer.encode(prompt)
    return ids


def render_chat(chat: Chat, tokenizer: Any, *, answer: bool = True) -> str:
    """The text of a chat as the model's template writes it, up to where an ``answer`` begins if one is wanted.

    Raises:
        PromptError: there is no template, or it refuses the messages.
    """
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        raise PromptError("chat prompts need a tokenizer with a chat template", hint="give text or token ids")
    messages, tools = ([dict(part) for part in parts] if parts is not None else None for parts in (chat.messages, chat.tools))
    try:
        text: str = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=answer, tokenize=False)
    except TemplateError as error:  # such as roles that must alternate, or a system message that the model knows none of
        raise PromptError("the model's chat template refuses these messages", cause=str(error)) from error
    except (TypeError, ValueError, LookupError, AttributeError) as error:  # a program, written for messages of some form
        raise PromptError("the model's chat template fails over these messages", cause=describe(error)) from error
    return text


def _chat(chat: Chat, tokenizer: Any) -> tuple[list[int], Spans]:
    text = render_chat(chat, tokenizer)
    _check_unicode(text)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    first_user = next((m["content"] for m in chat.messages if m.get("role") == "user"), "")
    at = text.find(first_user) if first_user else -1
    prefix = 0 if at <= 0 else _shared(ids, tokenizer.encode(text[:at], add_special_tokens=False))
    return ids, ((0, prefix),) if prefix else ()


def _check_unicode(text: str) -> None:
    """Half a surrogate pair, as JSON and bytes on a command line may bring one, is no character that has tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError("the prompt is not Unicode text", cause=f"{text[error.start]!r} at {error.start}") from error


def _shared(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common beginning."""
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def ending_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a sequence, as ``generate`` of transformers takes them: the generation config's, else the config's."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return (found,) if isinstance(found, int) else tuple(found)
    return ()

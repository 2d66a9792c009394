"""What a caller may ask of one request: lengths, sampling, penalties, stops, processors, logprobs."""

from __future__ import annotations

import dataclasses
import functools
import numbers
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from vericache_core.errors import ConfigError
from vericache_core.plugins.fields import METADATA_KEY, OptionField, coerce, did_you_mean, option, resolve_type

LogitsProcessor: TypeAlias = Callable[[tuple[int, ...], Tensor], Tensor]
"""``(prefix_ids, logits) -> logits``: prompt and committed ids, float32 ``[vocab]`` on the CPU, its own copy."""

_ELSEWHERE = {  # names of other libraries, and what is meant here
    "best_of": "one output per request; send several requests with different seeds",
    "do_sample": "temperature > 0 samples, temperature = 0 is greedy",
    "eos_token_id": "use stop_token_ids",
    "max_length": "use max_new_tokens, which does not count the prompt",
    "max_tokens": "use max_new_tokens",
    "min_tokens": "use min_new_tokens",
    "n": "one output per request; send several requests with different seeds",
    "no_repeat_ngram_size": "use no_repeat_ngram",
    "num_beams": "beam search is not offered; decoding is greedy or sampled",
    "num_return_sequences": "one output per request; send several requests with different seeds",
    "stop_strings": "use stop",
}


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end. Every field is checked on construction.

    Semantics are those of ``transformers`` where it has the feature (repetition penalty, n-grams, bad words,
    temperature, top-k, top-p, min-p; in that order) and of the OpenAI API for the presence and frequency
    penalties. ``logits_processors`` run after the penalties and before the temperature.

    A custom processor sees exactly the committed prefixes, once each and in order, whatever was drafted.
    One that keeps state and serves several requests should have a ``clone()`` method: each request then
    works on its own clone.
    """

    max_new_tokens: int = option(128, help="most tokens to generate", unit="tokens", ge=0)
    min_new_tokens: int = option(0, help="no EOS, stop id or stop string ends the output before this many", unit="tokens", ge=0)
    temperature: float = option(0.0, help="0 is greedy; larger is more random", ge=0)
    top_k: int | None = option(None, help="sample among the k most likely tokens; none or 0 keeps all", ge=0)
    top_p: float | None = option(None, help="sample from the smallest set with this probability mass", gt=0, le=1)
    min_p: float | None = option(None, help="drop tokens less likely than this share of the likeliest", ge=0, le=1)
    seed: int = option(0, help="same seed, same output", ge=0, lt=2**64)
    repetition_penalty: float = option(1.0, help="divides (multiplies, if negative) logits of tokens seen; 1 is off", gt=0)
    presence_penalty: float = option(0.0, help="subtracted from logits of tokens generated before")
    frequency_penalty: float = option(0.0, help="subtracted once per earlier generation of the token")
    no_repeat_ngram: int = option(0, help="no n-gram of this size occurs twice; 0 is off", unit="tokens", ge=0)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    stop: tuple[str, ...] = option((), help="strings that end the output; not part of the text")
    stop_token_ids: tuple[int, ...] = option((), help="token ids that end the output, as EOS does", ge=0)
    ignore_eos: bool = option(False, help="do not end at EOS")
    logits_processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = option(None, help="log probabilities of each token and of this many likeliest ones", ge=0)

    def __post_init__(self) -> None:
        # object.__setattr__ because the instance is frozen; this runs only while it is being built.
        stop: Any = self.stop  # a lone string is common, and would otherwise be read as a list of letters
        if isinstance(stop, str):
            object.__setattr__(self, "stop", (stop,))
        for field in _checked_fields().values():
            object.__setattr__(self, field.name, coerce(field, getattr(self, field.name), text=False, error=ConfigError))
        if self.top_k == 0:
            object.__setattr__(self, "top_k", None)
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logits_processors", _processors(self.logits_processors))
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens {self.min_new_tokens} is more than max_new_tokens {self.max_new_tokens}",
                hint="raise max_new_tokens or lower min_new_tokens",
            )
        if "" in self.stop:
            raise ConfigError("stop: an empty string matches everywhere", hint="remove it from stop")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, without noise."""
        return self.temperature == 0.0

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, text: bool = False) -> SamplingParams:
        """Build from names and values out of a file, a request or a command line.

        Args:
            mapping: field names to values; ``-`` may stand for ``_``.
            text: let a string stand for any scalar, as on a command line (``"0.7"`` for 0.7).

        Raises:
            ConfigError: for an unknown name (with the nearest known one), a wrong type or a value out of range.
        """
        checked, known = _checked_fields(), [field.name for field in dataclasses.fields(cls)]
        values = {}
        for given, value in mapping.items():
            name = given.replace("-", "_")
            if name not in known:
                raise _unknown(given, name, known)
            from_text = text and name in checked and not (name == "stop" and isinstance(value, str))
            values[name] = coerce(checked[name], value, text=True, error=ConfigError) if from_text else value
        return cls(**values)


def stop_ids(params: SamplingParams, eos_ids: Iterable[int]) -> frozenset[int]:
    """The token ids that end a request: EOS unless it is ignored, and the caller's own."""
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos_ids)


@functools.cache
def _checked_fields() -> dict[str, OptionField]:
    """The fields that the rules of options cover; the others (callables, mixed tuples) are checked by hand."""
    hints = typing.get_type_hints(SamplingParams)
    return {
        field.name: OptionField(field.name, resolve_type(hints[field.name]), field.metadata[METADATA_KEY], field.default)
        for field in dataclasses.fields(SamplingParams)
        if METADATA_KEY in field.metadata
    }


def _unknown(given: str, name: str, known: list[str]) -> ConfigError:
    if name in _ELSEWHERE:
        return ConfigError(f"unknown sampling parameter {given!r}", hint=_ELSEWHERE[name])
    near = did_you_mean(name, known)
    suffix = f"; did you mean {near!r}?" if near else ""
    return ConfigError(f"unknown sampling parameter {given!r}{suffix}", hint=f"valid parameters: {', '.join(known)}")


def _bad_words(value: Any) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)):
        raise _bad_word(value)
    return tuple(_one_bad_word(item) for item in value)


def _one_bad_word(item: Any) -> str | tuple[int, ...]:
    if isinstance(item, str) and item:
        return item
    if isinstance(item, (list, tuple)) and item and all(map(_is_id, item)):
        return tuple(int(part) for part in item)
    raise _bad_word(item)


def _is_id(value: Any) -> bool:
    return type(value) is not bool and isinstance(value, numbers.Integral) and int(value) >= 0


def _bad_word(item: Any) -> ConfigError:
    return ConfigError(
        f"bad_words: expected strings or lists of token ids, got {item!r}",
        hint='for example bad_words=("word",) or bad_words=((17, 4),)',
    )


def _processors(value: Any) -> tuple[LogitsProcessor, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"logits_processors: expected a list of callables, got {value!r}", hint="wrap it in a list")
    for item in value:
        if not callable(item):
            raise ConfigError(
                f"logits_processors: {item!r} is not callable", hint="give a function (prefix_ids, logits) -> logits"
            )
    return tuple(value)

"""The built-in logits processors: pure functions of the prefix and the logits.

Nothing here counts calls or remembers drafts: the penalties of a prefix are worked out from the prefix. Each
function returns a new array. They work on numpy arrays because the arrays are small: torch would split such
an operation over threads, and on a busy machine wait for them far longer than the work takes. Order, as in ``transformers``:

1. repetition penalty (prompt and generated), then frequency and presence penalty (generated only);
2. no-repeat n-gram, bad words (prompt and generated);
3. EOS and stop ids masked while fewer than ``min_new_tokens`` are generated;
4. the caller's own processors (in `choose`);
5. when sampling: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vericache_core.errors import ConfigError
from vericache_core.runtime.sampling_params import SamplingParams

NEG_INF = float("-inf")
_MASKED = np.float32(NEG_INF)
_SMALLEST = np.float32(1e-45)  # a temperature below that is 0 in float32
Ids: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float32]
BuiltIn: TypeAlias = Callable[["TokenHistory", Floats], Floats]


class TokenHistory:
    """Prompt and generated ids as one array, brought up to date by what changed since the last look.

    It is a cache and nothing more: `sync` compares with what it is given, so drafts that were rejected since
    leave no trace.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_length = len(prompt_ids)
        self._mirror: list[int] = []
        self._buffer = np.empty(self.prompt_length + 256, dtype=np.int64)
        self._buffer[: self.prompt_length] = prompt_ids

    def sync(self, generated: Sequence[int]) -> None:
        """Hold the prompt followed by exactly ``generated``."""
        tokens = generated if isinstance(generated, list) else list(generated)
        keep, step = min(len(self._mirror), len(tokens)), 1
        while self._mirror[:keep] != tokens[:keep]:
            keep, step = max(0, keep - step), step * 2
        end = self.prompt_length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate((self._buffer, np.empty(end, dtype=np.int64)))
        self._buffer[self.prompt_length + keep : end] = tokens[keep:]
        self._mirror[keep:] = tokens[keep:]

    @property
    def ids(self) -> Ids:
        """Prompt and generated ids, int64 ``[tokens]``; valid until the next `sync`."""
        return self._buffer[: self.prompt_length + len(self._mirror)]

    @property
    def generated(self) -> Ids:
        """Generated ids only, int64 ``[tokens]``; valid until the next `sync`."""
        return self.ids[self.prompt_length :]

    def check_integrity(self) -> None:
        """Raise AssertionError if the array and the list it mirrors differ."""
        assert self.generated.tolist() == self._mirror, "history array and mirror differ"


def repetition_penalty(ids: Ids, logits: Floats, penalty: float) -> Floats:
    """Divide positive logits of ids in the prefix by ``penalty`` and multiply negative ones by it."""
    seen = _known(ids, logits)
    picked = logits[seen]
    result = logits.copy()
    result[seen] = np.where(picked < 0, picked * np.float32(penalty), picked / np.float32(penalty))
    return result


def count_penalties(generated: Ids, logits: Floats, frequency: float, presence: float) -> Floats:
    """Subtract ``frequency * count + presence`` from the logit of each generated id, as the OpenAI API does."""
    seen, counts = np.unique(_known(generated, logits), return_counts=True)
    result = logits.copy()
    result[seen] = logits[seen] - np.float32(frequency) * counts.astype(np.float32) - np.float32(presence)
    return result


def no_repeat_ngram(ids: Ids, logits: Floats, size: int) -> Floats:
    """Mask every id that would complete an n-gram that the prefix holds already."""
    if len(ids) < size:
        return logits
    windows = np.lib.stride_tricks.sliding_window_view(ids, size)
    matches = (windows[:, :-1] == ids[len(ids) + 1 - size :]).all(axis=1)
    return _masked(logits, windows[matches, -1])


def bad_words(ids: Ids, logits: Floats, words: Iterable[tuple[int, ...]]) -> Floats:
    """Mask the last id of each word whose other ids end the prefix."""
    words = list(words)
    longest = max(len(word) for word in words)
    tail = tuple(ids[len(ids) - min(len(ids), longest) :].tolist())
    banned = [word[-1] for word in words if len(word) - 1 <= len(tail) and tail[len(tail) - len(word) + 1 :] == word[:-1]]
    return _masked(logits, np.asarray(banned, dtype=np.int64))


def min_new_tokens(generated: Ids, logits: Floats, minimum: int, ending: Ids) -> Floats:
    """Mask the ids that would end the output while fewer than ``minimum`` are generated."""
    return _masked(logits, ending) if len(generated) < minimum else logits


def filter_logits(params: SamplingParams, logits: Floats) -> Floats:
    """Temperature, top-k, top-p and min-p; removed ids get -inf.

    Top-k keeps all ids that tie with the k-th. At the edge of top-p the lower ids of a tie are kept. A
    temperature so small that the division overflows is applied to the logits minus their maximum.
    """
    temperature = np.float32(params.temperature) or _SMALLEST
    with np.errstate(over="ignore"):  # looked at right below
        scaled = logits / temperature
        if not np.isfinite(scaled.max()):
            scaled = (logits - logits.max()) / temperature
    if params.top_k is not None:
        threshold = float(torch.topk(torch.from_numpy(scaled), min(params.top_k, len(scaled))).values[-1])
        scaled = np.where(scaled < threshold, _MASKED, scaled)
    if params.top_p is not None and params.top_p < 1.0:
        scaled = _top_p(scaled, params.top_p)
    if params.min_p is not None:
        probabilities = torch.softmax(torch.from_numpy(scaled), dim=-1).numpy()
        scaled = np.where(probabilities < np.float32(params.min_p) * probabilities.max(), _MASKED, scaled)
    return scaled


def built_in_processors(
    params: SamplingParams,
    *,
    eos_ids: Iterable[int],
    ending_ids: Iterable[int],
    vocab_size: int,
    encode: Callable[[str], list[int]] | None,
) -> tuple[BuiltIn, ...]:
    """The processors that ``params`` turns on, in order; empty for plain greedy decoding.

    Raises:
        ConfigError: if bad words are strings and there is no ``encode``, or hold ids outside the vocabulary.
    """
    chain: list[BuiltIn] = []
    if params.repetition_penalty != 1.0:
        chain.append(lambda past, logits: repetition_penalty(past.ids, logits, params.repetition_penalty))
    if params.frequency_penalty != 0.0 or params.presence_penalty != 0.0:
        chain.append(
            lambda past, logits: count_penalties(past.generated, logits, params.frequency_penalty, params.presence_penalty)
        )
    if params.no_repeat_ngram > 0:
        chain.append(lambda past, logits: no_repeat_ngram(past.ids, logits, params.no_repeat_ngram))
    words = bad_word_ids(params.bad_words, eos_ids=eos_ids, vocab_size=vocab_size, encode=encode)
    if words:
        chain.append(lambda past, logits: bad_words(past.ids, logits, words))
    ending = np.array(sorted(ending_ids), dtype=np.int64)
    if params.min_new_tokens > 0 and len(ending):
        chain.append(lambda past, logits: min_new_tokens(past.generated, logits, params.min_new_tokens, ending))
    return tuple(chain)


def bad_word_ids(
    words: Iterable[str | tuple[int, ...]],
    *,
    eos_ids: Iterable[int],
    vocab_size: int,
    encode: Callable[[str], list[int]] | None,
) -> list[tuple[int, ...]]:
    """Bad words as id sequences: a string is encoded as it stands and with a space before it.

    A word that is nothing but one EOS id is left out, as in ``transformers``.

    Raises:
        ConfigError: for a string without ``encode``, a string that encodes to nothing, or an id too large.
    """
    eos, found = set(eos_ids), dict[tuple[int, ...], None]()
    for word in words:
        if not isinstance(word, str):
            variants = [word]
        elif encode is None:
            raise ConfigError(f"bad_words: {word!r} is text and there is no tokenizer", hint="give token ids")
        else:
            texts = [word] if word[0].isspace() else [word, " " + word]
            variants = [tuple(int(token) for token in encode(text)) for text in texts]
            if not variants[0]:
                raise ConfigError(f"bad_words: {word!r} encodes to no token", hint="remove it")
        for ids in variants:
            if any(token >= vocab_size for token in ids):
                raise ConfigError(f"bad_words: {word!r} holds an id outside the vocabulary of {vocab_size}")
            if ids and not (len(ids) == 1 and ids[0] in eos):
                found[ids] = None
    return list(found)


def _top_p(logits: Floats, top_p: float) -> Floats:
    # Sorting values alone is much faster than sorting (value, id) pairs; ties at the edge are settled below.
    values = np.sort(logits)
    mass = torch.softmax(torch.from_numpy(values), dim=-1).cumsum(dim=-1).numpy()
    removed = min(int((mass <= np.float32(1 - top_p)).sum()), len(values) - 1)
    edge = values[removed]
    kept_at_edge = int((values[removed:] == edge).sum())
    result = np.where(logits < edge, _MASKED, logits)
    result[np.flatnonzero(logits == edge)[kept_at_edge:]] = NEG_INF
    return result


def _known(ids: Ids, logits: Floats) -> Ids:
    """The ids that the logits cover (an embedding may be larger than the head)."""
    return ids[(ids >= 0) & (ids < len(logits))]


def _masked(logits: Floats, ids: Ids) -> Floats:
    result = logits.copy()
    result[_known(ids, logits)] = NEG_INF
    return result

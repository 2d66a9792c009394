"""What a request has produced, grown one committed token at a time.

Blocks do not exist here: a verify that accepts eight tokens commits eight times and stops where `commit`
says so. Streaming and non-streaming read the same buffer, so they cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from vericache_core.errors import ConfigError, VeriCacheError
from vericache_core.runtime.choose import Choice
from vericache_core.runtime.detokenize import Detokenizer, TextDecoder
from vericache_core.runtime.sampling_params import SamplingParams, stop_ids

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one committed token: its own, and the likeliest ids with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class OutputBuffer:
    """Tokens, text and finish of one request.

    After each token, in this order: an ending id (EOS unless ignored, ``stop_token_ids``) finishes with
    ``"stop"``; a stop string that the text now holds finishes with ``"stop"``; ``max_new_tokens`` finishes with
    ``"length"``. Neither ids nor strings finish anything before ``min_new_tokens`` are committed; a stop string
    completed by an earlier token stays in the text.

    Of several stop strings the one that begins first in the text counts, and among those that begin together
    the shortest. It, and what follows it, is not part of ``text``; ``token_ids`` and ``logprobs`` keep every
    committed token. The text of an ending id is left out, unless special tokens are kept.

    Args:
        params: of the request.
        eos_ids: ends of sequence of the model.
        tokenizer: a `TextDecoder` (make one and share it), anything with ``decode(ids)``, or None: the text is
            then empty.

    Raises:
        ConfigError: if there are stop strings and no tokenizer.
    """

    def __init__(self, params: SamplingParams, eos_ids: Iterable[int], tokenizer: Any | None = None) -> None:
        if params.stop and tokenizer is None:
            raise ConfigError("stop strings need a tokenizer", hint="use stop_token_ids")
        self.params = params
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._ending = stop_ids(params, eos_ids)
        self._detokenizer: Detokenizer | None = None
        self._omit_ending_text = True
        if tokenizer is not None:
            decode = tokenizer if isinstance(tokenizer, TextDecoder) else TextDecoder(tokenizer)
            self._detokenizer, self._omit_ending_text = Detokenizer(decode), decode.skip_special_tokens
        self._released: list[str] = []  # text that nothing can take back
        self._released_length = 0
        self._taken = 0  # entries of _released that take_delta has given out
        self._held = ""  # text that may be the beginning of a stop string
        self._immune = 0  # a stop string must end beyond this many characters (min_new_tokens)
        if params.max_new_tokens == 0:
            self._finish("length")

    @property
    def finished(self) -> bool:
        """Whether no more tokens can be committed."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """All deltas so far, taken or not; the final text once finished."""
        return "".join(self._released)

    def commit(self, choice: Choice) -> FinishReason | None:
        """Append one token; return why the request is finished, or None to go on."""
        if self.finished:
            raise VeriCacheError("a token was committed to a finished request")
        self.token_ids.append(choice.token)
        if self.logprobs is not None:
            if choice.logprob is None:
                raise VeriCacheError("the request wants logprobs and the choice carries none")
            self.logprobs.append(TokenLogprobs(choice.token, choice.logprob, choice.top_logprobs or ()))
        count = len(self.token_ids)
        may_stop = count >= self.params.min_new_tokens
        ends = choice.token in self._ending and may_stop
        if self._detokenizer is not None and not (ends and self._omit_ending_text):
            self._held += self._detokenizer.push(choice.token)
        if not may_stop:
            self._immune = self._released_length + len(self._held)
        if ends:
            self._finish("stop", choice.token)
        elif not (may_stop and self._cut_at_stop_string()) and count >= self.params.max_new_tokens:
            self._finish("length")
        if not self.finished:
            self._release_safe()
        return self.finish_reason

    def close(self, reason: Literal["cancelled", "error"] = "cancelled") -> None:
        """End an unfinished request from outside; what is held back becomes text. Does nothing when finished."""
        if not self.finished:
            self._finish(reason)

    def take_delta(self) -> str:
        """The text that became certain since the last call."""
        delta = "".join(self._released[self._taken :])
        self._taken = len(self._released)
        return delta

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, text and finish contradict each other."""
        assert self._released_length == sum(map(len, self._released)), "released length is wrong"
        assert self._taken <= len(self._released), "more taken than released"
        assert self.logprobs is None or len(self.logprobs) == len(self.token_ids), "logprobs and ids differ in number"
        assert len(self.token_ids) <= self.params.max_new_tokens, "more tokens than allowed"
        assert not (self.finished and self._held), "a finished request holds text back"
        if not self.finished:
            assert len(self.token_ids) < self.params.max_new_tokens, "the length limit was missed"
            assert self._held == "" or any(stop.startswith(self._held) for stop in self.params.stop), "text held for nothing"

    def _finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Flush the detokenizer and finish; the flush itself may complete a stop string."""
        if self._detokenizer is not None:
            self._held += self._detokenizer.finish()
            if len(self.token_ids) >= self.params.min_new_tokens and self._cut_at_stop_string():
                return
        self._release(self._held)
        self._held = ""
        self.finish_reason, self.stop_reason = reason, stop_reason

    def _cut_at_stop_string(self) -> bool:
        """Finish at the earliest stop string in the held text, if there is one."""
        begin, stop = len(self._held), None
        for candidate in self.params.stop:
            # One that ends inside the immune text is passed over; the search goes on from one further.
            earliest = max(0, self._immune - self._released_length - len(candidate) + 1)
            found = self._held.find(candidate, earliest)
            if found >= 0 and (stop is None or (found, len(candidate)) < (begin, len(stop))):
                begin, stop = found, candidate
        if stop is None:
            return False
        self._release(self._held[:begin])
        self._held = ""
        self.finish_reason, self.stop_reason = "stop", stop
        return True

    def _release_safe(self) -> None:
        """Release all of the held text but its longest suffix that a stop string may begin with."""
        keep = 0
        for stop in self.params.stop:
            for length in range(min(len(stop) - 1, len(self._held)), keep, -1):
                if self._held.endswith(stop[:length]):
                    keep = length
                    break
        upto = len(self._held) - keep
        self._release(self._held[:upto])
        self._held = self._held[upto:]

    def _release(self, piece: str) -> None:
        if piece:
            self._released.append(piece)
            self._released_length += len(piece)

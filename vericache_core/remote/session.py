"""The drafting side of one request: what to draft, what to send, what a verdict means.

Committed tokens are the verifier's alone. Drafts run ahead of it: a block is sent, and while its verdict is out the
drafter goes on as if everything were accepted and its own next token were the verifier's. A verdict that says otherwise
takes back what was built on the wrong draft.
"""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from vericache_core.errors import RemoteError
from vericache_core.remote.frames import Message, RunningDigest
from vericache_core.runtime.choose import Choice
from vericache_core.runtime.request import Request, Want


class RemoteSession:
    """State between drafting steps: ``request.tokens`` are committed, ``ahead`` continues them without being so.

    Args:
        request: holds prompt, parameters and output; its draft KV comes when the compressed prefix is there.
        window: most drafts in a block.
        vocab: entries of the vocabulary.

    Attributes:
        ahead: drafted tokens behind the committed ones, those on their way to the verifier first.
        flying: drafts whose verdict is out, or ``None``; the first verdict answers for none.
        number: the store's name for the session, once it is open.
    """

    def __init__(self, request: Request, window: int, vocab: int) -> None:
        self.request, self.window, self._vocab = request, window, vocab
        self.ahead: list[int] = []
        self.flying: int | None = 0
        self.seq = 0
        self.number: str | None = None
        self.closing = False
        self.sent_at = self.added_at = time.monotonic()
        self.first_draft_at: float | None = None
        self._digest = RunningDigest(request.tokens)

    @property
    def finished(self) -> bool:
        return self.request.finished

    def want(self, most: int) -> Want | None:
        """Rows for the next drafting step, at most ``most``; ``None`` when there is nothing worth drafting."""
        request, draft = self.request, self.request.draft
        if draft is None or self.finished or self.closing:
            return None
        # Behind the block that is out lie the draft of the verifier's own token and one more block.
        limit = self.window if self.flying is None else self.flying + 1 + self.window
        if len(self.ahead) >= min(limit, request.most_drafts):
            return None
        start = draft.tokens
        committed = len(request.tokens)
        pending = request.tokens[start:] + self.ahead[max(0, start - committed) :]
        return Want("draft", tuple(pending[:most]), start)

    def opening(self, prefix: int, most: int) -> Want | None:
        """Rows of the first drafting step behind ``prefix`` tokens, at most ``most``, for draft KV that is still to come."""
        return Want("draft", tuple(self.request.tokens[prefix : prefix + most]), prefix) if most else None

    def take(self, want: Want, logits: Tensor) -> None:
        """A drafting step computed ``want``; ``logits`` is ``[rows, vocab]``."""
        request, draft = self.request, self.request.draft
        assert draft is not None
        draft.advance(len(want.tokens))
        self._settle_rows()
        if draft.tokens < len(request.tokens) + len(self.ahead):
            return  # more of the prompt is to come
        self.ahead.append(request.chooser.draft(logits[len(want.tokens) - 1], [*request.generated, *self.ahead]))
        if self.first_draft_at is None:
            self.first_draft_at = time.monotonic()

    def block(self) -> list[int] | None:
        """Drafts to send now; ``None`` while more should be drafted first, or a verdict is out."""
        if self.flying is not None or self.finished or self.closing or self.number is None:
            return None
        enough = min(self.window, self.request.most_drafts)
        return self.ahead[:enough] if len(self.ahead) >= enough else None

    def sent(self, drafts: list[int]) -> Message:
        """Note that ``drafts`` go out; returns the question for the verifier."""
        self.flying, self.sent_at = len(drafts), time.monotonic()
        return Message(
            "verify", {"session": self.number, "seq": self.seq, "base": len(self.request.generated), "drafts": drafts}
        )

    def awaits(self, message: Message) -> bool:
        """Whether a verdict is the one that is due; others are late, doubled or of another session, and dropped."""
        same = message.fields.get("session") == self.number and message.fields.get("seq") == self.seq
        return same and message.fields.get("base") == len(self.request.generated) and self.flying is not None

    def take_verdict(self, message: Message, *, generates: bool = False) -> None:
        """Commit what the verifier decided and take back what was drafted behind a wrong draft.

        Raises:
            RemoteError: the verdict contradicts what was sent, the digest, or the end of the request.
        """
        request = self.request
        drafts = self.ahead[: self.flying or 0]
        most = request.params.max_new_tokens - len(request.generated) if generates else len(drafts) + 1
        tokens = message.numbers("tokens", 0, self._vocab - 1, most)
        digest, said = self._digest.after(tokens)
        if said != message.text("digest", 64):
            raise RemoteError("the two sides hold different tokens", cause="the digest of a verdict does not match")
        accepted = tokens[:-1]
        if not generates and accepted != drafts[: len(accepted)]:
            raise RemoteError("a verdict accepts drafts that were not sent")
        if not tokens and not request.finished:
            raise RemoteError("a verdict decides nothing")
        self._digest = digest
        self._commit(tokens, message)
        if request.output.finish_reason != message.fields.get("finish"):
            raise RemoteError("the two sides differ about the end of a request", cause=f"{message.fields.get('finish')!r:.40}")
        self._count(drafts, tokens)
        self.seq += 1
        self.flying = 0 if generates else None

    def _commit(self, tokens: list[int], message: Message) -> None:
        request = self.request
        for choice in _choices(tokens, message, request.params.logprobs is not None):
            if request.finished:
                raise RemoteError("a verdict goes on behind the end of a request")
            request.output.commit(choice)
            request.tokens.append(choice.token)
        agreed = 0
        while agreed < min(len(tokens), len(self.ahead)) and tokens[agreed] == self.ahead[agreed]:
            agreed += 1
        right = len(request.tokens) - len(tokens) + agreed
        self.ahead = self.ahead[agreed:] if agreed == len(tokens) else []
        if request.draft is not None:
            if agreed < len(tokens):
                request.draft.retract(max(0, request.draft.tokens - right))
            self._settle_rows()

    def _settle_rows(self) -> None:
        """Rows of committed tokens belong to the tail; no verdict can take them back."""
        draft = self.request.draft
        assert draft is not None
        certain = min(draft.tokens, len(self.request.tokens)) - draft.prefix_tokens - draft.tail
        draft.keep(max(0, certain))

    def _count(self, drafts: list[int], tokens: list[int]) -> None:
        metrics, accepted = self.request.metrics, 0
        while accepted < min(len(drafts), len(tokens)) and drafts[accepted] == tokens[accepted]:
            accepted += 1
        if drafts:
            drafted = accepted if self.finished and accepted == len(tokens) else len(drafts)
            metrics.rounds += 1
            metrics.drafted += drafted
            metrics.accepted += accepted
            metrics.drafted_per_round.append(drafted)
            metrics.accepted_per_round.append(accepted)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if tokens, rows and drafts disagree."""
        request, draft = self.request, self.request.draft
        assert request.tokens[request.prompt_tokens :] == list(request.generated)
        if draft is None or self.finished:
            return
        draft.check_integrity()
        assert draft.tokens <= len(request.tokens) + len(self.ahead)
        assert draft.prefix_tokens + draft.tail <= len(request.tokens)
        assert not self.ahead or draft.tokens >= len(request.tokens) - 1


def _choices(tokens: list[int], message: Message, logprobs: bool) -> list[Choice]:
    """The tokens as choices, with their log probabilities where those were asked for."""
    if not logprobs:
        return [Choice(token, float("nan")) for token in tokens]
    entries: Any = message.fields.get("logprobs")
    try:
        choices = [
            Choice(int(token), float("nan"), float(own), tuple((int(i), float(value)) for i, value in top))
            for token, own, top in entries
        ]
    except (TypeError, ValueError) as error:
        raise RemoteError("a verdict lacks its log probabilities", cause=type(error).__name__) from error
    if [choice.token for choice in choices] != tokens:
        raise RemoteError("log probabilities of other tokens than those of the verdict")
    return choices

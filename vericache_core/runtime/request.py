"""One request: its tokens, its two caches, and what it wants from the next step.

Between steps three facts hold: ``full.tokens < len(tokens)`` (the newest token has no KV row yet),
``draft`` stands for exactly ``full.tokens`` tokens, and ``drafts`` continue ``tokens`` without being
part of it. ``tokens`` only ever grows by what the full KV decided.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vericache_core.cache.draft import DraftKV
from vericache_core.cache.full import FullKV
from vericache_core.compressor import Compressor
from vericache_core.errors import VeriCacheError
from vericache_core.runtime.choose import Choice, TokenChooser
from vericache_core.runtime.metrics import NEAR_TIE, RequestMetrics
from vericache_core.runtime.output import OutputBuffer
from vericache_core.runtime.pace import Pace
from vericache_core.runtime.proposals import Proposals
from vericache_core.runtime.rounds import MOST
from vericache_core.runtime.sampling_params import SamplingParams

Phase = Literal["prefill", "decode", "draft", "verify"]
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Want:
    """Rows a request asks for: ``tokens`` at consecutive positions from ``position`` on."""

    phase: Phase
    tokens: tuple[int, ...]
    position: int


class Request:
    """State of one generation. Built by the engine; the step loop drives it.

    Args:
        prompt: token ids, at least one.
        params: sampling parameters.
        chooser, output: token choice and commit, made for ``params``.
        full: empty full KV.
        compressor: drafts with it when given.
        window: tokens to draft before a verify; with ``pace`` only until the first round.

    Attributes:
        pace: chooses the window of every round, when given.
        proposals: of its proposer, to the drafter, or to the full KV while nothing is drafted.
        draft_steps, draft_rows, step_drafts: steps that drafted, their rows, and the tokens that they brought.
        pinned: whether the full KV stays on the device.
        links: keys of the chunks of its tokens, as far as a prefix store asked for them.
        chunks_stored: first chunks that came from the store or were given to it.
        tenant: who else may not find out what it holds, in a prefix store of several tenants.
        stored: whether a prefix store may give and take its KV.
        prefix_only: only the KV of its prompt is wanted: all of it may come from a store, and nothing need be computed.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        chooser: TokenChooser,
        output: OutputBuffer,
        full: FullKV,
        compressor: Compressor | None,
        window: int,
        priority: int = 0,
    ) -> None:
        self.number = next(_numbers)
        self.tokens = list(prompt)
        self.prompt_tokens = len(self.tokens)
        self.params, self.chooser, self.output, self.full, self.window = params, chooser, output, full, window
        self.compressor, self.priority = compressor, priority
        self.compress_at = self.prompt_tokens
        self.draft: DraftKV | None = None
        self.drafts: list[int] = []
        self.verifying = False
        self.round_drafted = self.round_accepted = 0
        self.draft_steps = self.draft_rows = self.step_drafts = 0
        self.pace: Pace | None = None
        self._round_open = False
        self.error: VeriCacheError | None = None
        self.protected: tuple[tuple[int, int], ...] = ()
        self.logits: list[Tensor] | None = None
        self.recoveries = 0
        self.link_counted = (0.0, 0, 0.0)  # link seconds and bytes, seconds waited
        self.swapped_before = 0
        self.links: list[bytes] = []
        self.chunks_stored = 0
        self.tenant, self.stored, self.prefix_only = "", True, False
        self.metrics = RequestMetrics(prompt_tokens=self.prompt_tokens)
        self.proposals = Proposals(self.number, self.metrics)

    @property
    def finished(self) -> bool:
        return self.output.finished or self.error is not None

    @property
    def generated(self) -> Sequence[int]:
        """Committed tokens."""
        return self.output.token_ids

    @property
    def greatest_length(self) -> int:
        """Tokens when it has generated all that it may."""
        return len(self.tokens) + self.params.max_new_tokens - len(self.generated)

    @property
    def most_drafts(self) -> int:
        """Tokens worth drafting before a verify: no more than can still be committed with a bonus."""
        return max(0, self.params.max_new_tokens - len(self.generated) - 1)

    def round_window(self) -> int:
        """Window of the round under way; a new one begins when there is none."""
        if self.draft is None:
            return 0
        if not self._round_open:
            self._round_open = True
            if self.pace is not None:
                self.window = self.pace.next_window()
                self.metrics.windows.append(self.window)
        return self.window

    def may_draft_on(self) -> bool:
        """Whether it may draft beyond its window, as many tokens again, while its verify has to wait."""
        most = min(self.most_drafts, 2 * self.window, MOST)
        return self.draft is not None and not self.verifying and len(self.drafts) < most

    def want(self, phase: Phase) -> Want:
        """Rows for the next step. ``phase`` is the scheduler's wish: to draft one token more, or to ask the full KV.

        What the request is in the middle of comes first: a prefill, or a verify that did not fit into one step.
        """
        pending = self.tokens[self.full.tokens :]
        at = self.full.tokens
        if at < self.prompt_tokens or len(pending) > 1:
            self.proposals.follow(self.tokens, at)
            return Want("prefill", tuple(pending), at)
        if not self.verifying:
            if self.draft is not None and phase == "draft" and len(self.drafts) < self.most_drafts:
                newest = self.drafts[-1] if self.drafts else pending[0]
                room = min(self.window, self.most_drafts) - len(self.drafts) - 1
                proposed = self.proposals.to_drafter(self.tokens, self.drafts, room)
                return Want("draft", (newest, *proposed), self.draft.tokens)
            self.verifying = True
            self.proposals.forget()
            if self.draft is not None:
                self.draft.retract()
            if not self.drafts:
                self.drafts = self.proposals.to_full_kv(self.tokens, self.most_drafts)
        if not self.drafts:
            return Want("decode", tuple(pending), at)
        return Want("verify", (*pending, *self.drafts), at)

    def take_draft(self, logits: Tensor) -> None:
        """One more draft, by ``logits [vocab]`` of a row that a draft step computed."""
        assert self.draft is not None
        self.draft.advance(1)
        self.drafts.append(self.chooser.draft(logits, [*self.generated, *self.drafts]))

    def take_drafts(self, logits: Tensor) -> None:
        """A draft step answered with ``logits [rows, vocab]``: the newest token's row, then those of proposals.

        Proposals are kept as far as the drafter would have drafted them, and the token after them is its own.
        """
        proposed = self.proposals.asked[: len(logits) - 1]
        agreed = 0
        for row in logits:
            self.take_draft(row)
            if agreed == len(proposed) or self.drafts[-1] != proposed[agreed]:
                break
            agreed += 1
        self.draft_steps += 1
        self.draft_rows += len(logits)
        self.step_drafts += agreed + 1
        self.proposals.checked(len(proposed), agreed)

    def take_rows(self, want: Want, count: int, logits: Tensor) -> int:
        """An authoritative step computed the first ``count`` wanted rows; ``logits`` is ``[count, vocab]``.

        Commits token by token up to the first disagreement, the end of the request, or the last row.
        Returns how many rows of KV stay. Rows before the newest committed token decide nothing: a step that
        carries only such rows may come without logits.
        """
        decided = len(self.tokens) - want.position - 1  # row that answers for the newest committed token
        if count <= decided:
            return count
        kept = decided
        for row in range(decided, count):
            kept = row + 1
            choice = self.chooser.choose(logits[row], self.generated)
            self.commit(choice, logits[row])
            agreed = bool(self.drafts) and choice.token == self.drafts[0]
            # A rejection discards what was drafted behind it; the end of the request leaves it undecided.
            self.round_drafted += 1 if self.drafts and (agreed or self.finished) else len(self.drafts)
            self.round_accepted += agreed
            self.drafts = self.drafts[1:] if agreed and not self.finished else []
            if self.finished or not agreed:
                break
        if not self.drafts:
            self._close_round()
        return kept

    def commit(self, choice: Choice, logits: Tensor) -> None:
        """Append one decided token."""
        self.output.commit(choice)
        self.metrics.near_ties += choice.margin < NEAR_TIE
        self.tokens.append(choice.token)
        if self.logits is not None:
            self.logits.append(logits.detach().to("cpu", copy=True))

    def _close_round(self) -> None:
        if self.round_drafted:
            self.metrics.rounds += 1
            self.metrics.drafted += self.round_drafted
            self.metrics.accepted += self.round_accepted
            self.metrics.drafted_per_round.append(self.round_drafted)
            self.metrics.accepted_per_round.append(self.round_accepted)
        if self.proposals.asked:  # speculation on full KV
            self.proposals.checked(self.round_drafted, self.round_accepted)
            drafted = accepted = 0
        else:
            drafted, accepted = self.round_drafted, self.round_accepted
        self.proposals.round_ended(self.tokens)
        if self.pace is not None and self.draft is not None:
            self.pace.round_ended(drafted, accepted, self.round_accepted + 1)
        self.round_drafted = self.round_accepted = 0
        self.verifying = self._round_open = False

    def forget_draft(self) -> None:
        """Drop the draft KV and everything drafted; the request goes on from the full KV."""
        self.draft, self.drafts = None, []
        self.proposals.forget()
        self.verifying = self._round_open = False
        self.round_drafted = self.round_accepted = 0

    def fail(self, error: VeriCacheError) -> None:
        """End with ``error``; what was committed stays readable."""
        self.error = error
        self.output.close("error")
        self.close()

    def close(self) -> None:
        """Give back all caches; the output stays."""
        self.draft = None
        self.full.close()
        self.proposals.close()
        if self.pace is not None:
            self.pace.close()

    def device_bytes(self) -> int:
        """Device KV bytes that this request holds between steps."""
        draft = 0 if self.draft is None else self.draft.device_bytes
        return self.full.device_bytes + draft + self.proposals.device_bytes

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if tokens, caches and drafts disagree."""
        if self.finished:
            return
        assert self.full.tokens < len(self.tokens)
        assert self.tokens[self.prompt_tokens :] == list(self.generated)
        self.full.check_integrity()
        if self.draft is not None:
            self.draft.check_integrity()
            assert self.draft.drafted == 0 or self.draft.drafted == len(self.drafts)
        else:
            assert not self.drafts or self.verifying

"""The loop between a drafter and a verifier that share nothing but token ids."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from vericache_core.errors import PromptError, RemoteError, VeriCacheError, describe
from vericache_core.runtime.choose import Choice
from vericache_core.runtime.output import OutputBuffer
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_vllm.drafter import Drafter, DraftSession
from vericache_vllm.verdict import Check, Verdict, Verifier

log = logging.getLogger("vericache.vllm")


@dataclass
class Generated:
    """Tokens of one request and what they cost.

    Attributes:
        token_ids: committed tokens, an ending id included.
        finish_reason: ``"stop"``, ``"length"`` or ``"error"``.
        error: why, when ``finish_reason`` is ``"error"``; the tokens before it are right.
        rounds: verifications with drafts.
        drafted, accepted: tokens, over those rounds.
        cached, prompted: tokens whose KV came from a cache, of all tokens sent to the verifier.
        reruns: verifications run again because a cache covered the last verified token.
        ties: verifications that two equal scores left undecided.
        margin: smallest lead of a committed token over the second best, in nats, as far as rows told.
        degraded: why drafting ended early, if it did.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = "length"
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    cached: int = 0
    prompted: int = 0
    reruns: int = 0
    ties: int = 0
    margin: float = float("inf")
    degraded: str | None = None
    error: VeriCacheError | None = None

    @property
    def mean_run(self) -> float:
        """Accepted drafts per verification with drafts."""
        return self.accepted / self.rounds if self.rounds else 0.0


class _Live:
    """A request under way."""

    def __init__(self, prompt: Sequence[int], limit: int, ends: Collection[int]) -> None:
        self.prompt, self.limit = tuple(prompt), limit
        self.buffer = OutputBuffer(SamplingParams(max_new_tokens=limit, stop_token_ids=tuple(ends), ignore_eos=True), ())
        self.output = Generated(self.buffer.token_ids)
        self.session: DraftSession | None = None
        self.drafts: list[int] = []
        self.tied = False

    def check(self) -> Check:
        return Check((*self.prompt, *self.output.token_ids), tuple(self.drafts))

    def degrade(self, why: str) -> None:
        log.warning("drafting ends, plain decoding goes on: %s", why)
        self.output.degraded = why
        self.drafts = []
        self.close()

    def fail(self, error: VeriCacheError) -> None:
        log.warning("a request ends with %d tokens: %s", len(self.output.token_ids), error)
        self.buffer.close("error")
        self.output.finish_reason, self.output.error = "error", error
        self.close()

    def close(self) -> None:
        if self.session is not None:
            self.session.close()
            self.session = None

    def take(self, verdict: Verdict) -> None:
        output, sent = self.output, len(self.drafts)
        output.prompted += len(self.prompt) + len(output.token_ids) + sent
        output.cached += verdict.cached
        output.reruns += verdict.reruns
        output.margin = min(output.margin, *verdict.margins, float("inf"))
        if sent:
            output.rounds += 1
            output.drafted += sent
            output.accepted += verdict.accepted
        agreed = self.drafts[: verdict.accepted]
        self.drafts = []
        self.tied = verdict.token is None
        if self.tied:
            output.ties += 1
            if not sent:
                raise RemoteError("the verifier left a request without drafts undecided")
        for token in agreed if verdict.token is None else [*agreed, verdict.token]:
            reason = self.buffer.commit(Choice(token, math.inf))
            if reason is not None:
                output.finish_reason = reason
                return


def generate(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    verifier: Verifier,
    drafter: Drafter | None = None,
    window: int = 8,
    ends: Collection[int] = (),
) -> list[Generated]:
    """Decode greedily: ``drafter`` proposes, ``verifier`` decides; all requests go in rounds of one verification.

    Args:
        prompts: token ids.
        max_new_tokens: most tokens of each request.
        verifier: decides every token.
        drafter: ``None`` decodes plainly, one token a verification. A drafter that fails costs speed only.
        window: tokens drafted before a verification.
        ends: ids that end a request.

    Raises:
        PromptError: a prompt is empty or too long for the verifier.

    A verifier that fails ends the requests that it was asked about with ``finish_reason="error"`` and what it has decided
    of them; those that were done stay as they are.
    """
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise PromptError(f"prompt {number} is empty", hint="give at least one token")
        if len(prompt) + max_new_tokens > verifier.max_model_len:
            raise PromptError(
                f"prompt {number} has {len(prompt)} tokens; with max_new_tokens={max_new_tokens} that is more than the "
                f"verifier's {verifier.max_model_len}"
            )
    live = [_Live(prompt, max_new_tokens, ends) for prompt in prompts]
    try:
        while running := [request for request in live if not request.buffer.finished]:
            for request in running:
                _draft(request, drafter, window, verifier.vocab_size)
            verdicts = _verdicts(verifier, [request.check() for request in running])
            for request, verdict in zip(running, verdicts, strict=True):
                try:
                    if isinstance(verdict, VeriCacheError):
                        raise verdict
                    request.take(verdict)
                except VeriCacheError as error:
                    request.fail(error)
        return [request.output for request in live]
    finally:
        for request in live:
            request.close()


def _verdicts(verifier: Verifier, checks: Sequence[Check]) -> Sequence[Verdict | VeriCacheError]:
    """A verdict on each check, or for each of them what kept the verifier from it."""
    try:
        found = verifier.verify(checks)
    except VeriCacheError as error:
        return [error] * len(checks)
    except Exception as error:  # an engine in this process raises what it likes
        log.exception("the verifier failed")
        return [RemoteError("the verifier failed", cause=describe(error))] * len(checks)
    if len(found) != len(checks):
        return [RemoteError(f"the verifier did not answer {len(checks)} checks with as many verdicts")] * len(checks)
    return found


def _draft(request: _Live, drafter: Drafter | None, window: int, vocab_size: int) -> None:
    committed = request.output.token_ids
    # The bonus token of a verification is free: the last token needs no draft.
    count = min(window, request.limit - len(committed) - 1)
    if drafter is None or request.output.degraded or count <= 0 or request.tied:
        return
    try:
        if request.session is None:
            request.session = drafter.open(request.prompt)
        request.drafts = _proposals(request.session.propose(committed, count), count, vocab_size)
    except Exception as error:  # noqa: BLE001 (whatever a drafter raises costs speed, never tokens)
        request.degrade(str(error) if isinstance(error, VeriCacheError) else describe(error))


def _proposals(drafts: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """``drafts`` if they are what was asked for: a verifier refuses the request for others, and with it what stands."""
    if len(drafts) > count or not all(type(token) is int and 0 <= token < vocab_size for token in drafts):
        due = f"at most {count} token ids below {vocab_size} were due"
        raise VeriCacheError(f"the drafter proposed {str(list(drafts))[:100]}", cause=due)
    return list(drafts)

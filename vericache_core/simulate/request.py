"""A simulated request: lengths and bytes instead of tokens and tensors, and a hazard instead of a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vericache_core.runtime.costs import CostModel
from vericache_core.runtime.modes import Mode
from vericache_core.runtime.rounds import MOST, Situation
from vericache_core.runtime.schedulable import Bytes, Part
from vericache_core.runtime.speculation import SpeculationPace
from vericache_core.runtime.trace import Arrival
from vericache_core.runtime.window import Experience, WindowController
from vericache_core.simulate.compression import Compression, on_device
from vericache_core.simulate.lookup import Lookup, SimulatedLookup, agreed

UNSEEN_STEPS = 4
"""Draft steps without proposals that a request's own are averaged with, as in the engine."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a round came to.

    Attributes:
        asked: tokens that the full KV was asked about, of which it ``accepted`` the first ones.
        speculated: whether they were proposals that nothing was drafted for.
    """

    asked: int
    accepted: int
    speculated: bool


class SimulatedRequest:
    """See :class:`vericache_core.runtime.schedulable.Schedulable` for the properties that schedulers read.

    Attributes:
        away: its verify is in the background.
        token_bytes: of full KV per token.
        controller: chooses its windows from its arrival on, with the experience of others; None where they are given.
        lookup: proposes tokens, if it has a proposer.
        speculation: says how many of them the full KV is asked about; None where that follows what was accepted lately.
        proposed: proposals in the step under way, or that a verify still has to go through.
        verifying: a verify was cut at the end of a step and goes on in the next one.
    """

    def __init__(
        self,
        number: int,
        arrival: Arrival,
        compression: Compression,
        token_bytes: int,
        costs: CostModel,
        *,
        mode: Mode,
        tier: str,
        window: int,
        experience: Experience | None,
        prefill: bool,
        seed: int,
        hazards: Sequence[float] = (),
        turn: int = 100,
        page: int = 0,
        lookup: Lookup | None = None,
    ) -> None:
        self.number, self.arrival, self.priority = number, arrival.at, arrival.priority
        self.mode, self.tier = mode, tier
        self._chosen: int | None = window
        self._choose: Callable[[], int] | None = None
        self.controller: WindowController | None = None
        self._experience = experience
        self.away = False
        self.prompt, self.new_tokens = arrival.prompt_tokens, arrival.new_tokens
        self._hazards = hazards or (compression.hazard if arrival.hazard is None else arrival.hazard,)
        self._turn, self._page = turn, page
        self.prefill = self.prompt if prefill else 0
        self.committed = 0
        self.drafts = 0
        self.link_left: float | None = None
        self.first_token_at: float | None = None
        self._compression, self.token_bytes, self._costs = compression, token_bytes, costs
        self._numbers = random.Random(f"{seed} {number}")  # noqa: S311  (a simulation, no secret)
        apart = random.Random(f"{seed} {number} lookup")  # noqa: S311  (so that drafts are the same with and without)
        self.lookup = None if lookup is None else SimulatedLookup(lookup, self.prompt, apart)
        self.speculation: SpeculationPace | None = None
        self.proposed: list[int] = []
        self.verifying, self._held = False, 0  # and tokens that steps of this verify have accepted already
        self._draft_steps = self._draft_rows = self._step_drafts = 0

    def arrived(self, prices: Callable[[], Sequence[float]]) -> None:
        """It waits from here on. Its controller begins with what those before it have learnt, and brings its grant.

        ``prices`` are seconds of rounds by window, in the company of the moment.
        """
        if self._experience is not None:
            self.controller = controller = WindowController(self._experience, self.new_tokens)
            self._choose = lambda: controller.choose(prices())
            self.next_round()

    def next_round(self) -> None:
        """The next window is to be chosen; not before it is asked for, as in the engine, by the company of that moment."""
        self._chosen = None

    @property
    def chosen(self) -> int:
        """Drafts of the round under way, by its controller or for good."""
        if self._chosen is None:
            assert self._choose is not None
            self._chosen = self._choose()
        return self._chosen

    def left(self) -> None:
        """Its answer is complete."""
        if self.controller is not None:
            self.controller.close()

    # -- what schedulers read ------------------------------------------------------------------------

    @property
    def drafting(self) -> bool:
        """See the protocol."""
        return self.mode != "plain"

    @property
    def window(self) -> int:
        """See the protocol. Nothing is drafted behind a verify that was cut."""
        return self.drafts if self.verifying else self.chosen

    @property
    def may_draft_on(self) -> bool:
        """Whether it may draft beyond its window while its verify has to wait, as in the engine."""
        return not self.verifying and self.drafts < min(self.most, 2 * self.chosen, MOST)

    @property
    def most(self) -> int:
        """See the protocol."""
        return max(0, self.new_tokens - self.committed - 1)

    @property
    def holds(self) -> Bytes:
        """See the protocol."""
        full = (self.prompt + self.new_tokens + self._page) * self.token_bytes
        draft = self._draft_bytes(self.new_tokens + self._page)
        if self.mode == "plain":
            return Bytes(full, 0.0, 0.0)
        if self.mode == "pinned":
            return Bytes(full + draft, 0.0, 0.0)
        return Bytes(draft, full if self.tier == "host" else 0.0, full if self.tier == "disk" else 0.0)

    @property
    def transient(self) -> float:
        """See the protocol."""
        return self._resident(self.new_tokens)

    @property
    def link_seconds(self) -> float:
        """See the protocol. What streams in during the verify asks for no time before it."""
        return 0.0 if self._compression.ring else self.swap_seconds

    @property
    def swapped_in(self) -> bool:
        """See the protocol."""
        return self.mode != "offloaded" or self._compression.ring > 0 or (self.link_left is not None and self.link_left <= 0)

    # -- bytes ---------------------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """Tokens in its full KV."""
        return self.prompt - self.prefill + self.committed

    @property
    def full_bytes(self) -> float:
        """Bytes of its full KV."""
        return self.tokens * self.token_bytes

    @property
    def draft_bytes(self) -> float:
        """Bytes of its draft KV."""
        return self._draft_bytes(self.committed)

    @property
    def swap_bytes(self) -> float:
        """Bytes that a swap moves."""
        return self._swap_bytes(self.committed)

    @property
    def swap_seconds(self) -> float:
        """Link time of a swap."""
        return self._costs.swap_seconds(self.tier, self.swap_bytes) if self.mode == "offloaded" else 0.0

    @property
    def swapping_bytes(self) -> float:
        """Bytes on the device because of a swap."""
        return self._resident(self.committed)

    @property
    def device_bytes(self) -> float:
        """Bytes on the device now, without a swap."""
        if self.mode == "plain":
            return self.full_bytes
        return self.draft_bytes + (self.full_bytes if self.mode == "pinned" else 0.0)

    def _draft_bytes(self, committed: int) -> float:
        return (self.prompt * self._compression.keep + committed) * self.token_bytes

    def _swap_bytes(self, committed: int) -> float:
        if self.mode != "offloaded":
            return 0.0
        full = (self.prompt + committed) * self.token_bytes
        return full - self._draft_bytes(committed) if self._compression.delta else full

    def _resident(self, committed: int) -> float:
        if self.mode != "offloaded":
            return 0.0
        full = (self.prompt + committed) * self.token_bytes
        return on_device(self._compression, self._costs, full, self._swap_bytes(committed))

    # -- rounds --------------------------------------------------------------------------------------

    @property
    def text(self) -> range:
        """Its tokens, as a lookup knows them."""
        return range(self.prompt + self.committed)

    def wanted(self, part: Part) -> Part:
        """``part`` of a plan with all proposals that it may carry as well; a verify that was cut comes first.

        A plain token of a request whose full KV is not on the device is a verify of nothing: it has to be swapped in.
        """
        if part.phase == "prefill":
            return part
        if not self.verifying:
            self.proposed = []
            if part.phase == "draft":
                self.proposed = self._propose(min(self.chosen, self.most) - self.drafts - 1)
                return Part(part.number, "draft", 1 + len(self.proposed))
            if not self.drafts:
                self.proposed = self._propose(self.most, speculate=True)
        asked = self.drafts or len(self.proposed)
        verifies = asked or part.phase == "verify" or self.mode == "offloaded"
        return Part(part.number, "verify" if verifies else "decode", 1 + asked)

    def _propose(self, most: int, *, speculate: bool = False) -> list[int]:
        if self.lookup is None or most < 1:
            return []
        if speculate and self.speculation is not None:
            return self.speculation.propose(self.text, most)
        return self.lookup.propose(self.text, range(self.drafts), most)

    def draft(self, rows: int) -> None:
        """One token more is drafted, and as many before it as were proposed and the drafter would have drafted itself.

        The drafter is taken to agree with a proposal that is right and with no other. Proposals have ``rows`` less one.
        """
        self.proposed = self.proposed[: rows - 1]
        held = agreed(self.proposed, len(self.text) + self.drafts)
        self._told(len(self.proposed), held)
        self.drafts += held + 1
        self._draft_steps += 1
        self._draft_rows += 1 + len(self.proposed)
        self._step_drafts += held + 1
        self.proposed = []

    def verify(self, rows: int) -> Verdict | None:
        """The first ``rows`` rows of a verify, each of which commits a token, up to the first one that is not as asked.

        Returns what the round came to; None if all were and more of it is left for the next step.
        """
        left, speculated = self.drafts or len(self.proposed), bool(self.proposed)
        most, accepted = min(left, rows), 0
        if speculated:
            accepted = agreed(self.proposed[:most], len(self.text))
        else:
            while accepted < most and self._numbers.random() >= self.hazard(self.committed + accepted):
                accepted += 1
        self.committed += min(accepted + 1, rows)
        self.link_left, self.away = None, False
        self.verifying = accepted == rows < left
        if self.verifying:
            self._held += accepted
            self.drafts, self.proposed = max(0, self.drafts - rows), self.proposed[rows:]
            return None
        verdict = Verdict(self._held + left, self._held + accepted, speculated)
        if speculated:
            self._told(verdict.asked, verdict.accepted)
        self.drafts, self.proposed, self._held = 0, [], 0
        if self.speculation is not None:
            self.speculation.round_ended(self.text)
        return verdict

    def _told(self, proposed: int, held: int) -> None:
        if proposed and self.lookup is not None:
            self.lookup.told(proposed, held)

    def hazard(self, token: int) -> float:
        """Of a draft for that token of the answer."""
        return self._hazards[token // self._turn % len(self._hazards)]

    def situation(self, requests: int, swapping: int, *, lockstep: bool) -> Situation:
        """What the window controller's prices depend on."""
        return Situation(
            requests,
            self.tokens,
            self.full_bytes,
            self.draft_bytes,
            self.swap_bytes,
            self.tier,
            max(1, swapping),
            lockstep,
            (self._step_drafts + UNSEEN_STEPS) / (self._draft_steps + UNSEEN_STEPS),
            (self._draft_rows - self._draft_steps) / (self._draft_steps + UNSEEN_STEPS),
            ahead=not self._compression.ring,
        )

    @property
    def finished(self) -> bool:
        """Whether its answer is complete."""
        return self.committed >= self.new_tokens

    def preempted(self) -> None:
        """Everything it held is gone and will be computed again."""
        self.prefill, self.drafts, self.link_left, self.away = self.prompt + self.committed, 0, None, False
        self.proposed, self.verifying, self._held = [], False, 0

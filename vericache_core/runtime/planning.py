"""What an engine decides about a request before it runs: its mode, its bytes, and how it paces itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from vericache_core.cache.pages import PAGE
from vericache_core.config import EngineConfig
from vericache_core.model.adapter import ModelAdapter
from vericache_core.runtime.admission import AdmissionPolicy
from vericache_core.runtime.calibration import load_calibration, prior_key
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.link import LinkMeter
from vericache_core.runtime.lockstep import LockstepScheduler
from vericache_core.runtime.modes import LOCKSTEP_MARGIN, MODES, SWAP_MARGIN, Demand, Mode, best_mix
from vericache_core.runtime.pace import Pace
from vericache_core.runtime.propose import NGramProposer
from vericache_core.runtime.request import Request
from vericache_core.runtime.rounds import WINDOWS, RoundPricer, Situation
from vericache_core.runtime.schedulable import Bytes, Scheduler
from vericache_core.runtime.scheduler import StaggeredScheduler
from vericache_core.runtime.speculation import MOST_PROPOSALS, ProposalBelief, ProposalExperience, SpeculationPace
from vericache_core.runtime.window import Experience, WindowController

LINK_TOLERANCE = 0.1
"""Share by which a link may differ from what is believed of it before prices are worked out anew."""
HOPED_SHARE = 0.5
"""Bytes of a compressed prefix over those of the full one: of a compressor that names no budget, for the choice of a mode
until one was seen. Budgets reckon with all of them."""
UNSEEN_STEPS = 4
"""Draft steps without proposals that a request's own are averaged with."""
UNBOUNDED = 1e18
"""Bytes that stand for no budget."""


class Planner:
    """Decides for one engine.

    Args:
        config, adapter: of the engine.
        measure: measures the cost model; called at most once, and only if something is to be chosen by cost.
        fingerprint: what a calibration file must have been made with.
    """

    def __init__(
        self, config: EngineConfig, adapter: ModelAdapter, measure: Callable[[], CostModel], fingerprint: Callable[[], Any]
    ) -> None:
        self.config, self._adapter, self._measure = config, adapter, measure
        self._token_bytes = sum(layer.token_bytes for layer in adapter.layers)
        self._shares: dict[str, float] = {}
        self._experiences: dict[str, Experience] = {}
        self._pricer: RoundPricer | None = None
        self.link_meter = LinkMeter()
        priors: dict[str, Prior] = {}
        if config.calibration is not None:
            found = load_calibration(config.calibration, fingerprint())
            found.check_link(config.calibration, config.link_bytes_per_s)
            self._pricer, priors = RoundPricer(found.costs.limited(config.link_bytes_per_s)), dict(found.priors)
        self._priors, self._proposal_experience = priors, ProposalExperience()
        self.scheduler = self._make_scheduler()
        self._lockstep = isinstance(self.scheduler, LockstepScheduler)  # prices depend on how steps are shared

    @property
    def pricer(self) -> RoundPricer:
        """Prices by the calibration file, or by a measurement that the first question brings about.

        What swaps have cost lately replaces what a calibration says of their link.
        """
        if self._pricer is None:
            self._pricer = RoundPricer(self._measure().limited(self.config.link_bytes_per_s))
        costs = self._pricer.costs
        for tier, seen in self.link_meter.rates.items():
            known = costs.links.get(tier)
            if known is None or abs(seen - known.seconds_per_byte) > LINK_TOLERANCE * seen:
                costs = dataclasses.replace(costs, links={**costs.links, tier: Link(0.0, seen)})
        if costs is not self._pricer.costs:
            self._pricer = RoundPricer(costs)
        return self._pricer

    @property
    def chooses(self) -> bool:
        """Whether anything is to be chosen by cost."""
        return "auto" in (self.config.window, self.config.mode)

    def _make_scheduler(self) -> Scheduler:
        """The scheduler that the configuration asks for.

        ``auto`` is lock-step unless full KV may be swapped or windows are chosen one by one: with nothing to hide behind
        drafts, verifies are cheapest side by side in one large step, if nobody has to wait for a longer window.
        """
        config = self.config
        name = config.scheduler
        if name == "auto":
            swaps = config.mode == "offloaded" or (config.mode == "auto" and config.device_budget is not None)
            differ = config.window == "auto"
            name = "staggered" if differ or (swaps and config.full_kv != "device") else "lockstep"
        budgets = (config.device_budget, config.host_budget, config.disk_budget)
        budget = Bytes(*(float("inf") if limit is None else float(limit) for limit in budgets))
        policy = AdmissionPolicy(queue=config.max_queue, running=config.max_running)
        kind = StaggeredScheduler if name == "staggered" else LockstepScheduler
        return kind(budget, self._adapter.most_rows, policy)

    def mode(self, compressor: str | None, tokens: int, new_tokens: int, requests: int) -> Mode:
        """Mode for a request that will have ``tokens`` tokens, ``new_tokens`` of them new, among ``requests``."""
        if compressor is None or self.config.mode == "plain":
            return "plain"
        if self.config.mode == "auto":
            full = float(tokens * self._token_bytes)
            share = self.share(compressor, tokens, HOPED_SHARE)
            tier = self.config.full_kv
            demand = Demand(
                tokens,
                full,
                share * full,
                _swap_bytes(tier, full, share * full),
                full * self.config.ring_layers / len(self._adapter.layers),
                "host" if tier == "device" else tier,
                self._experience(self._key(compressor)).regimes.mean,
                new_tokens,
                plain_gain=self._plain_gain(tokens, full, requests),
            )
            mix = best_mix(
                self.pricer.costs,
                demand,
                requests,
                float(self.config.device_budget or UNBOUNDED),
                lockstep=self._lockstep,
                modes=MODES if self.config.full_kv != "device" else ("plain", "pinned"),
                windows=WINDOWS if self.config.window == "auto" else (0, self.config.window),
                margin=LOCKSTEP_MARGIN if self._lockstep else SWAP_MARGIN,
            )
            return mix.mode(0)
        return "pinned" if self.config.mode == "pinned" or self.config.full_kv == "device" else "offloaded"

    def _plain_gain(self, tokens: int, full: float, requests: int) -> float:
        """How much faster than token by token a plain request is, as far as proposals to the full KV have been seen."""
        if self.config.proposer != "ngram" or self.config.window != "auto":
            return 1.0
        budget = float(self.config.device_budget or UNBOUNDED)
        situation = Situation(max(1, min(requests, int(budget // full))), tokens, full, full)
        prices = self.pricer.speculation_prices(situation, MOST_PROPOSALS)
        return prices[0] / ProposalBelief(self._proposal_experience).best(prices)[1]

    def speculation(self, request: Request, company: Callable[[], tuple[int, int]]) -> SpeculationPace | None:
        """What says how many proposals the full KV of ``request`` is asked about; None where nothing is chosen by cost."""
        if self.config.window != "auto" or not isinstance(request.proposals.proposer, NGramProposer):
            return None

        def prices() -> tuple[float, ...]:
            return self.pricer.speculation_prices(self._situation(request, company), MOST_PROPOSALS)

        return SpeculationPace(request.proposals.proposer, self._proposal_experience, prices, request.prompt_tokens)

    def pace(self, request: Request, compressor: str, company: Callable[[], tuple[int, int]]) -> Pace | None:
        """A window controller for ``request`` if windows are chosen; ``company`` counts requests, and those that swap."""
        if self.config.window != "auto":
            return None
        key = self._key(compressor)
        controller = WindowController(self._experience(key), request.params.max_new_tokens)

        def prices() -> tuple[float, ...]:
            found, proposals = self.pricer.prices(self._situation(request, company)), request.proposals
            # Requests propose one after the other, so each pays its own time and nobody else's.
            found = tuple(price + proposals.seconds(window) for window, price in enumerate(found))
            return found if proposals.speculation is None else proposals.speculation.weigh(found)

        return Pace(controller, prices)

    def _experience(self, key: str) -> Experience:
        if key not in self._experiences:
            self._experiences[key] = Experience(self._priors.get(key))
        return self._experiences[key]

    def _situation(self, request: Request, company: Callable[[], tuple[int, int]]) -> Situation:
        requests, swapping = company()
        tokens, draft = request.full.tokens, request.draft
        full = float(tokens * self._token_bytes)
        held = full if draft is None else float(draft.device_bytes)
        swapped = 0.0
        if request.full.offloaded:
            spared = 0.0 if draft is None or draft.has_codes else held
            swapped = _swap_bytes(request.full.tier, full, spared)
        steps = request.draft_steps
        return Situation(
            max(1, requests),
            tokens,
            full,
            held,
            swapped,
            request.full.tier,
            swapping,
            self._lockstep,
            # A few steps that brought one token each are believed in before any was seen.
            (request.step_drafts + UNSEEN_STEPS) / (steps + UNSEEN_STEPS),
            (request.draft_rows - steps) / (steps + UNSEEN_STEPS),
        )

    def holds(self, request: Request) -> Bytes:
        """Bytes of ``request`` at its greatest length: an estimate until its prefix is compressed, then a measurement."""
        rest = request.params.max_new_tokens - len(request.generated)
        full = float((request.greatest_length + PAGE) * self._token_bytes)
        draft = request.proposals.holds(request.greatest_length)
        metrics = request.metrics
        if request.draft is not None:
            draft += float(request.draft.device_bytes + (rest + PAGE) * self._token_bytes)
            if metrics.compressed_from_bytes and metrics.compressor is not None:
                self.saw(metrics.compressor, metrics.compressed_kv_bytes / metrics.compressed_from_bytes)
        elif request.compressor is not None and metrics.compressor is not None:
            share = self.share(metrics.compressor, request.prompt_tokens)
            draft += (share * request.prompt_tokens + request.params.max_new_tokens + PAGE) * self._token_bytes
        if not request.full.offloaded:
            return Bytes(full + draft, 0.0, 0.0)
        return Bytes(draft, full, 0.0) if request.full.tier == "host" else Bytes(draft, 0.0, full)

    def saw(self, compressor: str, share: float) -> None:
        """Learn that a compressed prefix had this share of the full one's bytes."""
        key = self._key(compressor)
        self._shares[key] = max(share, self._shares.get(key, 0.0))

    def share(self, compressor: str, tokens: int, unknown: float = 1.0) -> float:
        """Bytes of the compressed prefix over those of the full one: what was seen, else what was asked for, or ``unknown``."""
        seen = self._shares.get(self._key(compressor))
        if seen is not None:
            return min(1.0, seen * 1.02)
        options = self.config.options_of(compressor)
        if "keep_tokens" in options:
            return min(1.0, float(options["keep_tokens"]) / tokens)
        return min(1.0, float(options["keep"]) * 1.02) if "keep" in options else unknown

    def _key(self, compressor: str) -> str:
        return prior_key(compressor, self.config.options_of(compressor))


def _swap_bytes(tier: str, full: float, exact: float) -> float:
    """Bytes that come in before a verify, of ``full`` on ``tier``, where ``exact`` are held by the draft KV, row for row.

    Disks are read in whole pages, so nothing is spared there.
    """
    return full if tier == "disk" else max(0.0, full - exact)

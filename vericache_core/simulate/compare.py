"""A workload on a machine, by VeriCache and by plain decoding with the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from vericache_core.errors import ConfigError
from vericache_core.runtime.admission import AdmissionPolicy
from vericache_core.runtime.costs import Block, CostModel, StepLoad
from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.lockstep import LockstepScheduler
from vericache_core.runtime.modes import LOCKSTEP_MARGIN, MODES, SWAP_MARGIN, Demand, Mix, Mode, best_mix
from vericache_core.runtime.rounds import MOST, WINDOWS, Situation, speculation_seconds
from vericache_core.runtime.schedulable import Bytes, Scheduler
from vericache_core.runtime.scheduler import StaggeredScheduler
from vericache_core.runtime.speculation import MOST_PROPOSALS, ProposalBelief, ProposalExperience
from vericache_core.runtime.timeline import Span
from vericache_core.runtime.trace import Arrival
from vericache_core.runtime.window import Experience
from vericache_core.simulate.clock import Simulation
from vericache_core.simulate.compression import Compression, demand
from vericache_core.simulate.lookup import Lookup
from vericache_core.simulate.request import SimulatedRequest
from vericache_core.simulate.result import Result

Order = Literal["staggered", "lockstep"]


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    Attributes:
        costs: of the model on the machine.
        token_bytes: of KV per token.
        budget: bytes for KV by tier.
        arrivals: the workload, in order.
        compression: of the drafts.
        mode: of every request, or ``auto``.
        window: of every request, or None for the controller's choice.
        order: which scheduler.
        tier: of offloaded KV.
        prefill: whether prompts are computed; otherwise their KV is there, compressed and all.
        prior: the controller's belief before the first round; None for the default.
        rows: most rows of a step.
        seed: of the accepted drafts.
        turns: dealt to requests in turn: hazards of which each holds for ``turn`` tokens; none for the arrivals' own.
        background: with a ring, verifies whose swap takes longer than a step run beside the steps of others.
        page: tokens that are reserved beyond the length of each cache, since memory comes in pages.
        copies, between: what a CPU spends on copying swapped bytes, by byte, and between steps, by request.
        lookups: dealt to requests in turn, what prompt lookup is to them; none for no proposer. How many proposals the full
            KV is asked about is chosen by cost where windows are, as in the engine; else it follows what was accepted lately.
        running: requests that run at a time, if there is room; None for as many as look best.
    """

    costs: CostModel
    token_bytes: int
    budget: Bytes
    arrivals: Sequence[Arrival]
    compression: Compression = field(default_factory=Compression)
    mode: Mode | Literal["auto"] = "auto"
    window: int | None = None
    order: Order = "staggered"
    tier: str = "host"
    prefill: bool = False
    prior: Prior | None = None
    rows: int = 512
    seed: int = 0
    turns: Sequence[Sequence[float]] = ()
    turn: int = 100
    background: bool = True
    page: int = 0
    copies: float = 0.0
    between: float = 0.0
    lookups: Sequence[Lookup] = ()
    running: int | None = None


def simulate(setup: Setup, listener: Callable[[Span], None] | None = None) -> Result:
    """Run the workload; ``listener`` hears what happens when.

    Raises:
        ConfigError: options conflict, or a request cannot fit.
    """
    if setup.mode == "plain" and setup.window:
        raise ConfigError(f"window={setup.window} has no meaning in plain mode", hint="leave one of them out")
    if setup.window is not None and not 0 <= setup.window <= MOST:
        raise ConfigError(f"window: expected 0 to {MOST}, got {setup.window}")
    modes, running = _modes(setup)
    if setup.running is not None:
        running = setup.running
    elif setup.order == "lockstep":
        running = len(setup.arrivals)  # those that find no room verify in the steps after
    policy = AdmissionPolicy(queue=max(1024, len(setup.arrivals)), running=running)
    scheduler: Scheduler
    if setup.order == "lockstep":
        scheduler = LockstepScheduler(setup.budget, setup.rows, policy)
    else:
        scheduler = StaggeredScheduler(setup.budget, setup.rows, policy, step_seconds=_step_seconds(setup))
    experience = Experience(setup.prior)
    requests = [
        SimulatedRequest(
            number,
            arrival,
            setup.compression,
            setup.token_bytes,
            setup.costs,
            mode=mode,
            tier=setup.tier,
            window=0 if mode == "plain" else setup.window or 0,
            experience=None if mode == "plain" or setup.window is not None else experience,
            prefill=setup.prefill,
            seed=setup.seed,
            hazards=setup.turns[number % len(setup.turns)] if setup.turns else (),
            turn=setup.turn,
            page=setup.page,
            lookup=setup.lookups[number % len(setup.lookups)] if setup.lookups else None,
        )
        for number, (arrival, mode) in enumerate(zip(setup.arrivals, modes, strict=True))
    ]
    background = setup.background and setup.compression.ring > 0 and setup.order != "lockstep"
    return Simulation(
        setup.costs,
        scheduler,
        requests,
        lockstep=_in_step(setup),
        background=background,
        copies=setup.copies,
        between=setup.between,
        rows=setup.rows,
        proposals=ProposalExperience() if _speculates(setup) else None,
        listener=listener,
    ).run()


def _speculates(setup: Setup) -> bool:
    """Whether it is chosen by cost how many proposals the full KV is asked about."""
    return bool(setup.lookups) and setup.window is None


def _in_step(setup: Setup) -> bool:
    """Whether swaps hide behind the step that verifies, and no other."""
    return setup.order == "lockstep" or (setup.compression.ring > 0 and not setup.background)


def _step_seconds(setup: Setup) -> float:
    """A step that drafts for as many requests as there are or fit; the scheduler soon measures it."""
    prompts = sum(arrival.prompt_tokens for arrival in setup.arrivals) * setup.token_bytes
    read = min(setup.budget.device, prompts * setup.compression.keep)
    return setup.costs.compute_seconds(StepLoad(len(setup.arrivals), (Block(read),)))


def _modes(setup: Setup) -> tuple[list[Mode], int]:
    """Modes of the requests and how many are best run at a time.

    Each gets the best mix for as many requests like it as there are; modes are dealt out so that a mix holds at any
    time.
    """
    allowed: tuple[Mode, ...] = MODES if setup.mode == "auto" else (setup.mode,)
    windows = WINDOWS if setup.window is None else (setup.window,)
    modes: list[Mode] = []
    mixes: dict[Demand, Mix] = {}
    many = len({(arrival.prompt_tokens, arrival.new_tokens) for arrival in setup.arrivals}) > 64
    owed = 0.0
    for arrival in setup.arrivals:
        prompt, new = arrival.prompt_tokens, arrival.new_tokens
        if many:  # lengths within a few percent share a mix
            prompt, new = _round_up(prompt), _round_up(new)
        like = Arrival(0.0, prompt, new)
        hazard = setup.compression.hazard if setup.prior is None else setup.prior.hazard
        needs = demand(like, setup.compression, setup.token_bytes, setup.costs, setup.tier, hazard)
        if needs not in mixes:
            believed = replace(needs, plain_gain=_plain_gain(setup, needs)) if _speculates(setup) else needs
            mixes[needs] = best_mix(
                setup.costs,
                believed,
                len(setup.arrivals),
                setup.budget.device,
                lockstep=_in_step(setup),
                modes=allowed,
                windows=windows,
                margin=LOCKSTEP_MARGIN if setup.order == "lockstep" else SWAP_MARGIN,
            )
        mix = mixes[needs]
        if mix.plain:
            modes.append("plain")
            continue
        owed += mix.pinned / (mix.pinned + mix.offloaded)
        modes.append("pinned" if owed >= 1 - 1e-9 else "offloaded")
        owed -= modes[-1] == "pinned"
    swapping = [mix.pinned + mix.offloaded for mix in mixes.values() if mix.offloaded]
    return modes, max(swapping, default=len(modes))


def _plain_gain(setup: Setup, needs: Demand) -> float:
    """How much faster than token by token a plain request is believed to be before any proposal was seen, as in the engine."""
    requests = int(max(1, min(len(setup.arrivals), setup.budget.device // needs.full_bytes)))
    situation = Situation(requests, needs.tokens, needs.full_bytes, needs.full_bytes)
    prices = [speculation_seconds(setup.costs, situation, proposals) for proposals in range(MOST_PROPOSALS + 1)]
    return prices[0] / ProposalBelief(ProposalExperience()).best(prices)[1]


def _round_up(tokens: int) -> int:
    step = max(1, 1 << max(0, tokens.bit_length() - 5))
    return -(-tokens // step) * step

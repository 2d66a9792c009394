"""The stand-in for prompt lookup, and requests that are simulated with it, against rounds counted by hand."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest

from vericache_core.cli import simulate_proposer
from vericache_core.runtime import planning, speculation
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.propose import Length, NGramProposer
from vericache_core.runtime.schedulable import Bytes
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate import request
from vericache_core.simulate.compare import Setup, simulate
from vericache_core.simulate.compression import Compression
from vericache_core.simulate.lookup import MOST, Lookup, SimulatedLookup, agreed
from vericache_core.simulate.result import Result

PROMPT = 7
LINKS = {"host": Link(0.0, 1e-9)}
STEP = CostModel({128: 1.0}, 0.0, 0.0, LINKS)
"""A second a step, whatever it carries."""


def tables(seed: int, length: int = 60) -> tuple[list[bool], list[bool]]:
    numbers = random.Random(seed)
    return [numbers.random() < 0.7 for _ in range(length)], [numbers.random() < 0.75 for _ in range(length)]


def as_lookup(there: list[bool], right: list[bool]) -> Lookup:
    return Lookup(tuple(map(float, there)), tuple(float(not each) for each in right))


def by_hand(there: list[bool], right: list[bool], at: int, most: int) -> tuple[int, int]:
    """``(proposed, right)`` of a round that begins with token ``at``."""
    if not there[at] or most < 1:
        return 0, 0
    count = 0
    while count < most and right[at + count]:
        count += 1
    return most, count


@pytest.mark.parametrize("seed", range(5))
def test_what_it_would_have_said_is_what_it_says(seed: int) -> None:
    there, right = tables(seed)
    found = SimulatedLookup(as_lookup(there, right), PROMPT, random.Random(0))
    at, expected = 3, []
    while at < 40:
        expected.append(by_hand(there, right, at, min(5, 40 - at)))
        at += expected[-1][1] + 1
    assert found.replay(range(PROMPT + 40), PROMPT + 3, 5) == expected
    for start in range(40):
        said = found.look_up(range(PROMPT + start), (), 5)
        assert (len(said), agreed(said, PROMPT + start)) == by_hand(there, right, start, 5)
        assert found.look_up(range(PROMPT), range(start), 5) == said  # drafts count as text


def test_chances_are_met_and_stay() -> None:
    found = SimulatedLookup(Lookup((0.6,), (0.2,)), PROMPT, random.Random(1))
    said = [found.look_up(range(PROMPT + at), (), 1) for at in range(4000)]
    proposed = [(at, each[0]) for at, each in enumerate(said) if each]
    assert len(proposed) / 4000 == pytest.approx(0.6, abs=0.03)
    assert sum(token == PROMPT + at for at, token in proposed) / len(proposed) == pytest.approx(0.8, abs=0.03)
    assert said == [found.look_up(range(PROMPT + at), (), 1) for at in range(4000)]


@pytest.mark.parametrize("chances", [{"found": ()}, {"wrong": (0.5, 1.5)}, {"found": (-0.1,)}, {"wrong": (float("nan"),)}])
def test_chances_are_numbers_from_0_to_1(chances: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected numbers from 0 to 1"):
        Lookup(**chances)


def test_what_is_taken_from_the_engine_is_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies where an import would bring torch along, or take a number apart that the engine has no name for."""
    assert request.UNSEEN_STEPS == planning.UNSEEN_STEPS
    assert inspect.signature(NGramProposer).parameters["most"].default == MOST
    priors: list[Prior] = []

    def noted(prior: Prior, **_: float) -> None:
        priors.append(prior)

    monkeypatch.setattr(speculation, "HazardEstimate", noted)
    monkeypatch.setattr(speculation, "Regimes", noted)
    speculation.ProposalExperience()
    none, wrong = priors
    assert (float(simulate_proposer.SHARE), float(simulate_proposer.HAZARD)) == (1 - none.hazard, wrong.hazard)


def run(costs: CostModel = STEP, **changes: Any) -> Result:
    facts: dict[str, Any] = {"mode": "plain", "window": 0, "arrivals": [Arrival(0.0, 100, 61)], "rows": 128}
    return simulate(Setup(costs, 1, Bytes(1e18), **{**facts, **changes}))


@pytest.mark.parametrize("seed", range(5))
def test_a_plain_request_asks_as_much_as_was_accepted_lately(seed: int) -> None:
    there, right = tables(seed)
    length, at, steps, asked, kept = Length(MOST), 0, 0, 0, 0
    while at < 61:
        proposed, accepted = by_hand([*there, False], [*right, False], at, min(length.value, 61 - at - 1))
        if proposed:
            length.told(proposed, accepted)
        at, steps, asked, kept = at + accepted + 1, steps + 1, asked + proposed, kept + accepted
    found = run(lookups=[as_lookup([*there, False], [*right, False])])
    assert (found.seconds, found.proposed, found.proposals_kept, found.tokens) == (steps, asked, kept, 61)
    assert found.windows == []


def test_proposals_cost_their_rows() -> None:
    """A second a row: four proposals at first, then eight and all that were accepted, with the token before them."""
    costs = CostModel({rows: float(rows) for rows in range(1, 65)}, 0.0, 0.0, LINKS)
    found = run(costs, lookups=[Lookup((1.0,), (0.0,))], arrivals=[Arrival(0.0, 100, 14)])
    assert (found.proposed, found.seconds) == (12, 5 + 9)


def test_how_many_are_worth_their_rows_is_chosen_by_cost() -> None:
    always = [Lookup((1.0,), (0.0,))]
    dear = CostModel({rows: 1.0 if rows == 1 else 100.0 * rows for rows in range(1, 65)}, 0.0, 0.0, LINKS)
    assert run(dear, window=None, lookups=always).proposed == 0
    free = run(window=None, lookups=always)
    assert free.proposed == free.proposals_kept > 50
    assert free.seconds < 61 / 8
    never = run(window=None, lookups=[Lookup((0.0,), (0.0,))])
    assert (never.seconds, never.proposed) == (61, 0)
    wrong = run(CostModel({1: 1.0, 32: 1.2}, 0.0, 0.0, LINKS), window=None, lookups=[Lookup((1.0,), (1.0,))])
    assert 61 < wrong.seconds < 1.15 * 61  # asked some 30 times in vain, then no more


def test_a_drafter_takes_proposals_in_one_step() -> None:
    """Windows of 9: four proposals and a draft in the first step, four more (8 are wanted) without a row behind, verify."""
    facts: dict[str, Any] = {
        "mode": "pinned",
        "window": 9,
        "order": "lockstep",
        "compression": Compression(0.5, 0.0),
        "arrivals": [Arrival(0.0, 100, 21)],
    }
    found = run(lookups=[Lookup((1.0,), (0.0,))], **facts)
    assert (found.windows, found.accepted, found.seconds) == ([9, 9], 18, 2 + 1 + 1 + 1 + 1)
    assert found.proposed == 0  # by the full KV
    assert run(**facts).seconds == 9 + 1 + 9 + 1 + 1
    nothing = run(lookups=[Lookup((0.0,), (0.0,))], **facts)
    assert nothing.seconds == 21


def test_drafts_are_the_same_with_and_without() -> None:
    facts: dict[str, Any] = {"mode": "pinned", "window": 4, "compression": Compression(0.5, 0.3)}
    assert run(**facts).accepted == run(lookups=[Lookup((0.0,), (0.0,))], **facts).accepted


def test_requests_share_the_rows_of_a_step() -> None:
    """Rows for the first request's proposals and a part of the second's; the third waits."""
    facts: dict[str, Any] = {"arrivals": [Arrival(0.0, 10, 6)] * 3, "rows": 8, "lookups": [Lookup((1.0,), (0.0,))]}
    costs = CostModel({8: 1.0}, 0.0, 0.0, LINKS)
    # 5 rows of the first and 3 of the second, then the third and the rest.
    assert run(costs, **facts).seconds == 3


def test_a_drafter_rests_where_speculation_is_cheaper() -> None:
    """Full rows read three times as much as drafts, of which all are right, too; proposals need no draft step."""
    costs = CostModel({1: 0.1, 128: 0.1}, 1e-4, 0.0, LINKS)
    facts: dict[str, Any] = {"mode": "pinned", "window": None, "compression": Compression(0.3, 0.0), "seed": 3}
    drafted = run(costs, arrivals=[Arrival(0.0, 3000, 200)], **facts)
    asked = run(costs, arrivals=[Arrival(0.0, 3000, 200)], lookups=[Lookup((1.0,), (0.0,))], **facts)
    assert sum(drafted.windows) > 100 > sum(asked.windows)
    assert asked.proposed > 100
    assert asked.seconds < drafted.seconds


def test_modes_are_chosen_with_what_proposals_are_hoped_to_gain() -> None:
    """A compressor whose drafts gain a little over plain tokens, and less than proposals do."""
    costs = CostModel({1: 0.1, 32: 0.1, 128: 1.0}, 1e-4, 1e-7, LINKS)
    facts: dict[str, Any] = {"mode": "auto", "window": None, "compression": Compression(0.6, 0.05), "prior": None}
    arrivals = [Arrival(0.0, 1000, 100)]
    drafted = run(costs, arrivals=arrivals, **facts)
    assert drafted.windows
    speculated = run(costs, arrivals=arrivals, lookups=[Lookup((0.9,), (0.1,))], **facts)
    assert speculated.proposed
    assert speculated.peak_kv_bytes <= 1100 < drafted.peak_kv_bytes  # plain: no draft KV beside the full one

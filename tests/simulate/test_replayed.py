"""Rounds of a measured run, from traces made up by hand and by the simulator itself."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from vericache_core.runtime.costs import CostModel, Link
from vericache_core.runtime.schedulable import Bytes
from vericache_core.runtime.timeline import Span
from vericache_core.runtime.trace import Arrival
from vericache_core.simulate.compare import Setup, simulate
from vericache_core.simulate.lookup import Lookup
from vericache_core.simulate.replayed import Round, fixed_window, lookups, rounds, wrong_drafts
from vericache_core.simulate.request import SimulatedRequest, Verdict


def test_what_was_committed_is_counted_over_drafts_proposals_and_plain_tokens() -> None:
    trace = {
        # Request 1: two drafts and their verify, a plain token, proposals, two verifies in the background, one of no drafts.
        "phases": [
            [0.0, 1.0, 1, "draft"],
            [0.0, 2.0, 0, "prefill"],
            [1.0, 2.0, 1, "draft"],
            [2.0, 3.0, 1, "verify"],
            [3.0, 4.0, 1, "decode"],
            [4.0, 5.0, 1, "verify"],
            [4.0, 5.0, 0, "decode"],
            [5.0, 6.0, 1, "draft"],
            [6.0, 9.0, 1, "background"],
            [9.0, 12.0, 1, "background"],
            [12.0, 13.0, 1, "decode"],
        ],
        "windows": [[3.1, 1, 2, 1], [5.1, 1, 4, 4], [9.5, 1, 1, 1]],
    }
    assert rounds(trace) == [
        Round(0, 0, 0, 0, False),
        Round(1, 0, 2, 1, True),
        Round(1, 2, 0, 0, False),
        Round(1, 3, 4, 4, False),
        Round(1, 8, 1, 1, True),
        Round(1, 10, 0, 0, False),
        Round(1, 11, 0, 0, False),
    ]


def test_wrong_drafts_are_those_of_compressed_kv_alone() -> None:
    found = [Round(0, 0, 4, 2, True), Round(0, 3, 4, 1, False), Round(1, 0, 4, 4, True), Round(1, 5, 9, 3, True)]
    mean = 2 / 11  # nine were right, and two were wrong, one of which is past the end
    first, second = wrong_drafts([found], 2, 8)
    assert first == (0.0, 0.0, 1.0, mean, mean, mean, mean, mean)
    assert second == (0.0, 0.0, 0.0, 0.0, mean, 0.0, 0.0, 0.0)
    assert wrong_drafts([[Round(0, 0, 4, 2, False)]], 1, 8) == ()


def test_what_was_not_drafted_is_what_another_run_saw_and_else_the_mean() -> None:
    """A round that failed and plain tokens from then on; another run drafted some of those."""
    failed = [Round(0, 0, 4, 0, True), *(Round(0, at, 0, 0, False) for at in range(1, 8))]
    assert wrong_drafts([failed], 1, 8) == ((1.0,) * 8,)
    other = [Round(0, 0, 2, 2, True), Round(0, 3, 2, 1, True)]
    assert wrong_drafts([failed, other], 1, 8) == ((1.0, 0.0, 2 / 5, 0.0, 1.0, 2 / 5, 2 / 5, 2 / 5),)
    assert wrong_drafts([other, failed], 1, 8) == ((0.0, 0.0, 2 / 5, 0.0, 1.0, 2 / 5, 2 / 5, 2 / 5),)


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([Round(0, 0, 8, 8, True), Round(0, 9, 8, 3, True), Round(0, 13, 3, 3, True)], 8),
        ([Round(0, 0, 8, 8, True), Round(0, 9, 6, 3, True), Round(0, 13, 3, 3, True)], None),
        ([Round(0, 0, 8, 8, True), Round(0, 9, 2, 1, False), Round(0, 11, 5, 3, True)], 8),
        ([Round(0, 0, 4, 4, False)], None),
        ([], None),
    ],
)
def test_a_window_is_one_that_only_the_end_of_the_answer_cuts(found: list[Round], expected: int | None) -> None:
    assert fixed_window(found, 17) == expected


def test_lookups_know_what_was_asked_and_take_the_mean_elsewhere() -> None:
    found = [Round(0, 0, 4, 2, False), Round(0, 3, 0, 0, False), Round(0, 4, 2, 2, False), Round(1, 0, 8, 8, True)]
    first, second = lookups(found, 2, 8)
    share, hazard = 2 / 3, 1 / 5
    assert first.found == (1.0, 1.0, share, 0.0, 1.0, 1.0, share, share)
    assert first.wrong == (0.0, 0.0, 1.0, hazard, 0.0, 0.0, hazard, hazard)
    assert (set(second.found), set(second.wrong)) == ({share}, {hazard})
    assert lookups([Round(0, 0, 4, 2, True), Round(0, 3, 0, 0, False)], 1, 8) == ()


@pytest.mark.parametrize(
    ("changes", "drafts"), [({"mode": "plain", "window": 0}, False), ({"mode": "pinned", "window": 5}, True)]
)
def test_a_simulated_run_gives_itself_back(changes: dict[str, Any], drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate, write the trace that the benchmark would, fit it, simulate again."""
    costs = CostModel({8: 0.02, 32: 0.03, 128: 0.1}, 1e-9, 1e-8, {"host": Link(0.0, 1e-9)})
    arrivals = [Arrival(0.0, 100 + 10 * number, 60) for number in range(3)]
    facts: dict[str, Any] = {"arrivals": arrivals, "rows": 128, "order": "lockstep", **changes}
    more: dict[str, Any] = {"turns": ((0.2,), (0.05,))} if drafts else {"lookups": [Lookup((0.7,), (0.25,))]}
    spans: list[Span] = []
    verdicts: dict[int, list[tuple[int, int]]] = defaultdict(list)
    with monkeypatch.context() as patched:
        plain = SimulatedRequest.verify

        def noted(request: SimulatedRequest, rows: int) -> Verdict | None:
            verdict = plain(request, rows)
            if verdict is not None and verdict.asked:
                verdicts[request.number].append((verdict.asked, verdict.accepted))
            return verdict

        patched.setattr(SimulatedRequest, "verify", noted)
        first = simulate(Setup(costs, 100, Bytes(1e18), **facts, **more), spans.append)
    phases = [[span.start, span.end, span.number, span.kind] for span in spans]
    verifies = [span for span in spans if span.kind == "verify"]
    windows = [[span.end, span.number, *verdicts[span.number].pop(0)] for span in verifies]
    found = rounds({"phases": phases, "windows": windows})
    if drafts:
        again = simulate(Setup(costs, 100, Bytes(1e18), **facts, turns=wrong_drafts([found], 3, 60), turn=1))
        assert fixed_window(found, 60) == 5
    else:
        again = simulate(Setup(costs, 100, Bytes(1e18), **facts, lookups=lookups(found, 3, 60)))
    assert (again.windows, again.accepted, again.proposed, again.proposals_kept) == (
        first.windows,
        first.accepted,
        first.proposed,
        first.proposals_kept,
    )
    assert again.seconds == pytest.approx(first.seconds)

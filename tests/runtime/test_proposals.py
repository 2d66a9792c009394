"""What a request asks of its proposer, and what becomes of that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from vericache_core.runtime.metrics import RequestMetrics
from vericache_core.runtime.proposals import Proposals
from vericache_core.runtime.propose import NGramProposer
from vericache_core.runtime.speculation import MOST_PROPOSALS, ProposalExperience, SpeculationPace

TEXT = [1, 2, 3, 4, 5, 6] * 4


class Told(NGramProposer):
    """Notes what it is told; raises in ``fails``."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.heard: list[tuple[int, int]] = []
        self.closed = 0
        self._fails = fails

    def propose(self, tokens: Sequence[int], drafts: Sequence[int], most: int) -> list[int]:
        if self._fails == "propose":
            raise ValueError("no more")
        return super().propose(tokens, drafts, most)

    def replay(self, tokens: Sequence[int], start: int, most: int) -> list[tuple[int, int]]:
        if self._fails == "replay":
            raise ValueError("no more")
        return super().replay(tokens, start, most)

    def told(self, proposed: int, accepted: int) -> None:
        self.heard.append((proposed, accepted))
        super().told(proposed, accepted)

    def close(self) -> None:
        self.closed += 1
        super().close()


def proposals(proposer: Told | None, *, prices: Sequence[float] = ()) -> Proposals:
    found = Proposals(7, RequestMetrics())
    found.proposer = proposer
    if prices and proposer is not None:
        found.speculation = SpeculationPace(proposer, ProposalExperience(), lambda: prices, len(TEXT))
    return found


def test_without_a_proposer_there_is_nothing() -> None:
    found = proposals(None)
    found.follow(TEXT, 4)
    assert list(found.to_drafter(TEXT, (), 8)) == found.to_full_kv(TEXT, 8) == []
    found.checked(0, 0)
    found.round_ended(TEXT)
    found.close()
    assert found.device_bytes == found.holds(100) == found.seconds(8) == 0


def test_the_next_stage_is_asked_and_the_proposer_told() -> None:
    proposer = Told()
    found = proposals(proposer)
    assert list(found.to_drafter(TEXT, [1, 2], 3)) == found.asked == [3, 4, 5]
    found.checked(3, 2)
    assert found.asked == []
    assert found.to_full_kv(TEXT, 2) == [1, 2]  # as many as held lately, which speaks for two
    found.checked(2, 2)
    assert proposer.heard == [(3, 2), (2, 2)]
    assert (found._metrics.proposed, found._metrics.proposals_kept) == (5, 4)


def test_what_is_not_checked_any_more_counts_for_nothing() -> None:
    """A draft step that had no room left, and then a verify: its proposals must not be taken for the verify's."""
    proposer = Told()
    found = proposals(proposer)
    assert found.to_drafter(TEXT, (), 3)
    found.forget()
    assert found.asked == []
    found.checked(0, 0)
    assert proposer.heard == []


def test_speculation_asks_for_what_is_worth_its_rows() -> None:
    free = tuple(1.0 for _ in range(MOST_PROPOSALS + 1))
    dear = tuple(1.0 + 10.0 * rows for rows in range(MOST_PROPOSALS + 1))
    assert len(proposals(Told(), prices=free).to_full_kv(TEXT, 64)) == MOST_PROPOSALS
    assert proposals(Told(), prices=dear).to_full_kv(TEXT, 64) == []
    assert list(proposals(Told(), prices=dear).to_drafter(TEXT, (), 3)) == [1, 2, 3]  # drafters are asked all the same


@pytest.mark.parametrize("where", ["propose", "replay"])
def test_a_proposer_that_raises_is_let_go_with_a_note(where: str) -> None:
    proposer = Told(where)
    found = proposals(proposer, prices=[1.0] * (MOST_PROPOSALS + 1))
    assert list(found.to_drafter(TEXT, (), 3)) == ([] if where == "propose" else [1, 2, 3])
    found.forget()
    found.round_ended([*TEXT, 1, 2])
    assert found.proposer is None
    assert found.speculation is None
    assert proposer.closed == 1
    assert found._metrics.degraded == ["proposer failed: ValueError: no more"]
    assert found.to_full_kv(TEXT, 4) == []

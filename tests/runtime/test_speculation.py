"""Speculation on full KV: proposals that are verified without a drafter between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from vericache_core.runtime.hazard import Prior
from vericache_core.runtime.pace import Pace
from vericache_core.runtime.propose import NGramProposer
from vericache_core.runtime.speculation import MOST_PROPOSALS, ProposalBelief, ProposalExperience, SpeculationPace
from vericache_core.runtime.window import Experience, WindowController


def naive(tokens: Sequence[int], most: int) -> list[int]:
    """What followed the last occurrence of the newest 4, 3 or 2 tokens, repeating itself where the text ends."""
    for size in (4, 3, 2):
        end = list(tokens[-size:])
        for at in range(len(tokens) - 1, size - 1, -1):
            if len(end) == size and list(tokens[at - size : at]) == end:
                found = list(tokens[at : at + most])
                while found and len(found) < most:
                    found.append(found[len(found) - (len(tokens) - at)])
                return found
    return []


def texts() -> list[list[int]]:
    draw = random.Random(5)
    found = [[draw.randrange(3) for _ in range(60)], [1, 2, 3] * 15, [7] * 20, list(range(30)), [5], []]
    return [*found, [draw.randrange(40) for _ in range(20)] * 3]


@pytest.mark.parametrize("tokens", texts())
def test_a_proposal_is_what_followed_last_time(tokens: list[int]) -> None:
    proposer = NGramProposer()
    for stop in range(len(tokens)):
        assert proposer.look_up(tokens[:stop], (), 6) == naive(tokens[:stop], 6)


@pytest.mark.parametrize("tokens", texts())
@pytest.mark.parametrize("start", [0, 1, 9])
def test_a_replay_takes_the_rounds_that_speculation_would_have_taken(tokens: list[int], start: int) -> None:
    expected, at = [], start
    while at < len(tokens):
        asked = naive(tokens[:at], min(6, len(tokens) - at))
        agreed = next((i for i, token in enumerate(asked) if token != tokens[at + i]), len(asked))
        expected.append((len(asked), agreed))
        at += agreed + 1
    assert NGramProposer().replay(tokens, start, 6) == expected


def test_a_replay_does_not_look_ahead() -> None:
    """The pair comes a second time only behind the start, so nothing could have been proposed there."""
    tokens = [1, 2, 3, 4, 9, 8, 7, 6, 9, 8, 7, 6]
    assert NGramProposer().replay(tokens, 4, 4)[:4] == [(0, 0)] * 4


def prices(per_row: float) -> tuple[float, ...]:
    return tuple(1.0 + per_row * count for count in range(MOST_PROPOSALS + 1))


def test_as_many_proposals_as_are_worth_their_rows() -> None:
    good, bad = ProposalBelief(ProposalExperience()), ProposalBelief(ProposalExperience())
    for _ in range(40):
        good.observe(16, 16)
        bad.observe(16, 0)
    assert good.best(prices(0.3))[0] == MOST_PROPOSALS
    assert good.best(prices(0.3))[1] < 0.5
    assert bad.best(prices(0.3)) == (0, 1.0)
    some = ProposalBelief(ProposalExperience())
    for number in range(200):
        some.observe(16, 1 + number % 3)
    assert 1 <= some.best(prices(0.2))[0] <= 4
    assert some.best(prices(2.0))[0] == 0


def test_rounds_without_a_proposal_cost_what_a_plain_token_does() -> None:
    rare, common = ProposalBelief(ProposalExperience()), ProposalBelief(ProposalExperience())
    for _ in range(100):
        common.observe(8, 8)
        rare.observe(0, 0)
        rare.observe(0, 0)
        rare.observe(8, 8)
    assert common.best(prices(0.1))[1] < rare.best(prices(0.1))[1] < 1.0


def test_requests_begin_with_the_experience_of_others() -> None:
    experience = ProposalExperience()
    for _ in range(60):
        ProposalBelief(experience).observe(16, 0)
    assert ProposalBelief(experience).best(prices(0.5))[0] == 0
    assert ProposalBelief(ProposalExperience()).best(prices(0.5))[0] > 0


def test_a_pace_learns_from_what_was_committed_whether_it_asked_or_not() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8] * 3
    pace = SpeculationPace(NGramProposer(), ProposalExperience(), lambda: prices(0.3), len(tokens))
    before = pace.seconds_per_token()
    for _ in range(6):
        tokens += [1, 2, 3, 4, 5, 6, 7, 8]
        pace.round_ended(tokens)
    assert pace.seconds_per_token() < before
    asked = pace.propose(tokens, 100)
    assert len(asked) > 4
    assert asked == ([1, 2, 3, 4, 5, 6, 7, 8] * 2)[: len(asked)]
    assert pace.propose(tokens, 2) == [1, 2]


def test_windows_are_weighed_against_speculation() -> None:
    """Drafting saves a third of a plain token's time; proposals that all hold save more."""
    rounds = tuple(1.0 + 0.6 * window for window in range(65))
    plain = Pace(WindowController(Experience(Prior(0.01, 100.0)), 128), lambda: rounds)
    assert plain.next_window() > 0
    speculation = SpeculationPace(NGramProposer(), ProposalExperience(), lambda: prices(0.0), 0)
    for length in range(1, 40):
        speculation.round_ended([3] * length)
    weighed = Pace(WindowController(Experience(Prior(0.01, 100.0)), 128), lambda: speculation.weigh(rounds))
    assert weighed.next_window() == 0

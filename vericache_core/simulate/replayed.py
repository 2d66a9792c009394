"""What a measured run knows of its drafts and proposals: its rounds, and which tokens they had right.

All tables are by token of the measured part of an answer: the first token comes with the prefill and is no part of it. Runs
of a workload write the same tokens, whatever drafts them, so a table of one run holds for another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vericache_core.simulate.lookup import Lookup

Tables = tuple[tuple[float, ...], ...]
"""Chances by request and token."""


@dataclass(frozen=True, slots=True)
class Round:
    """What the full KV said once. It committed what was accepted and one token more.

    Attributes:
        at: tokens that were committed before.
        drafted: tokens that it was asked about, of which it ``accepted`` the first ones.
        compressed: whether compressed KV drafted them; else they were proposals, or there were none.
    """

    request: int
    at: int
    drafted: int
    accepted: int
    compressed: bool


def rounds(trace: Mapping[str, Any]) -> list[Round]:
    """The rounds of a run, each request's in order, from its trace as ``--lines`` writes it.

    ``windows`` of a trace holds ``(seconds, request, drafted, accepted)`` where anything was drafted or proposed, ``phases``
    holds ``(from, to, request, phase)`` of all steps. Those that decoded committed a token each, and so did verifies in the
    background that no window is told of.
    """
    events = [(at, request, "verify", drafted, accepted) for at, request, drafted, accepted in trace["windows"]]
    events += [(end, request, phase, 0, 0) for _, end, request, phase in trace["phases"] if phase not in ("prefill", "verify")]
    events.sort(key=lambda event: (event[1], event[0]))
    found: list[Round] = []
    before, committed, compressed, beside = None, 0, False, False
    for _, request, phase, drafted, accepted in events:
        if request != before:
            before, committed, compressed, beside = request, 0, False, False
        if beside and phase != "verify":  # the one before asked about nothing
            found.append(Round(request, committed, 0, 0, False))
            committed += 1
        beside = phase == "background"
        if phase == "draft":
            compressed = True
        elif phase != "background":
            found.append(Round(request, committed, drafted, accepted, compressed))
            committed, compressed = committed + accepted + 1, False
    return found


def fixed_window(found: Sequence[Round], new_tokens: int) -> int | None:
    """The window of ``found``, None if it changed or nothing was drafted; ends of answers may cut it short."""
    drafted = [each for each in found if each.compressed]
    most = max((each.drafted for each in drafted), default=0)
    whole = all(each.drafted >= min(most, new_tokens - each.at - 1) for each in drafted)
    return most if most and whole else None


def wrong_drafts(runs: Sequence[Sequence[Round]], requests: int, new_tokens: int) -> Tables:
    """Chances that a draft is wrong; empty if compressed KV drafted nothing.

    Args:
        runs: rounds of runs that drafted with the same compressed KV. Of each token the first of them that had it drafted
            says whether the draft was wrong, 1.0, or right, 0.0; one that none had drafted has their mean hazard.
        requests: of each run.
        new_tokens: of each answer.
    """
    # What is entered last holds.
    return _wrong([each for found in reversed(runs) for each in found if each.compressed], requests, new_tokens)


def lookups(found: Sequence[Round], requests: int, new_tokens: int) -> tuple[Lookup, ...]:
    """What prompt lookup was to each request; empty if the full KV was asked about no proposal.

    A token that no proposal was checked for has the mean chance of the run to be proposed wrongly, one with which no round
    began the mean chance that there is anything to propose: within accepted proposals there was. A round that asked about
    nothing counts as one with nothing to propose, which holds for runs that always ask: a trace does not say why.
    """
    speculated = [each for each in found if not each.compressed]
    wrong = _wrong(speculated, requests, new_tokens)
    if not wrong:
        return ()
    share = sum(each.drafted > 0 for each in speculated) / len(speculated)
    there = [[share] * new_tokens for _ in range(requests)]
    for each in speculated:
        for at in range(each.at, min(each.at + each.accepted, new_tokens)):
            there[each.request][at] = 1.0
        if each.at < new_tokens:
            there[each.request][each.at] = float(each.drafted > 0)
    return tuple(Lookup(tuple(chances), own) for chances, own in zip(there, wrong, strict=True))


def _wrong(found: Sequence[Round], requests: int, new_tokens: int) -> Tables:
    """1.0 where a token was refused, 0.0 where one was accepted, their mean elsewhere; empty if none was checked.

    If not all of a round was accepted, it is the token after what was accepted that was refused.
    """
    checked = sum(each.accepted + (each.accepted < each.drafted) for each in found)
    if not checked:
        return ()
    mean = sum(each.accepted < each.drafted for each in found) / checked
    wrong = [[mean] * new_tokens for _ in range(requests)]
    for each in found:
        end = each.at + each.accepted
        for at in range(each.at, min(end, new_tokens)):
            wrong[each.request][at] = 0.0
        if each.accepted < each.drafted and end < new_tokens:
            wrong[each.request][end] = 1.0
    return tuple(map(tuple, wrong))

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


def window(found: Sequence[Round], new_tokens: int) -> int | None:
    """The window of ``found``, None if it changed or nothing was drafted; ends of answers may cut it short."""
    drafted = [each for each in found if each.compressed]
    most = max((each.drafted for each in drafted), default=0)
    whole = all(each.drafted >= min(most, new_tokens - each.at - 1) for each in drafted)
    return most if most and whole else None


def wrong_drafts(found: Sequence[Round], requests: int, new_tokens: int) -> Tables:
    """1.0 where a draft was wrong and 0.0 elsewhere; empty if compressed KV drafted nothing.

    If not all was accepted it is the token after what was accepted that was drafted wrongly.
    """
    wrong = [[0.0] * new_tokens for _ in range(requests)]
    for each in found:
        at = each.at + each.accepted
        if each.compressed and each.accepted < each.drafted and at < new_tokens:
            wrong[each.request][at] = 1.0
    return tuple(map(tuple, wrong)) if any(each.compressed for each in found) else ()


def lookups(found: Sequence[Round], requests: int, new_tokens: int) -> tuple[Lookup, ...]:
    """What prompt lookup was to each request; empty if the full KV was asked about no proposal.

    A token that no proposal was checked for has the mean chance of the run to be proposed wrongly, one with which no round
    began the mean chance that there is anything to propose: within accepted proposals there was.
    """
    direct = [each for each in found if not each.compressed]
    checked = sum(each.accepted + (each.accepted < each.drafted) for each in direct)
    if not checked:
        return ()
    share = sum(each.drafted > 0 for each in direct) / len(direct)
    hazard = sum(each.accepted < each.drafted for each in direct) / checked
    there = [[share] * new_tokens for _ in range(requests)]
    wrong = [[hazard] * new_tokens for _ in range(requests)]
    for each in direct:
        for at in range(each.at, min(each.at + each.accepted, new_tokens)):
            there[each.request][at], wrong[each.request][at] = 1.0, 0.0
        if each.at < new_tokens:
            there[each.request][each.at] = float(each.drafted > 0)
        if each.accepted < each.drafted and each.at + each.accepted < new_tokens:
            wrong[each.request][each.at + each.accepted] = 1.0
    return tuple(Lookup(tuple(chances), tuple(own)) for chances, own in zip(there, wrong, strict=True))

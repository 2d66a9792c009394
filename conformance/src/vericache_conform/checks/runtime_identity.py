"""Identity: whatever the compressor returns, tokens and logits are those of the full cache, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vericache_conform import models, reference
from vericache_conform.bench import Bench, greedy, spied
from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.mismatch import first_difference, margin_facts, require_same
from vericache_conform.outcome import Evidence, Failure, Skip
from vericache_core.runtime.sampling_params import SamplingParams

TOKENS = 24
REFERENCE_BOUND = 2e-3
"""Largest top-2 margin, as a share of the largest logit, at which an independent loop may choose another token."""
_FIX = (
    "A compressor cannot change the output unless it changes something that is not its own: weights, hooks, torch settings, "
    "the full cache. Look for in-place writes and global state (C-06, S-05); if those pass, this is a bug of the runtime."
)


def identical(case: Case, example: Mapping[str, Any]) -> None:
    """Run one example and compare it with the full cache alone."""
    bench = Bench(case, example["architecture"])
    prompt = bench.prompt(example["tokens"], example.get("prompt", 0))
    params = SamplingParams(max_new_tokens=example.get("new", TOKENS), **example.get("sampling", {}))
    expected = bench.plain(prompt, params)
    with bench.engine(example["options"], window=example["window"], **example.get("config", {})) as engine:
        got = bench.run(engine, prompt, params)
    require_same(expected, got, f"{example['architecture']}, window {example['window']}")
    case.facts["tokens_compared"] = case.facts.get("tokens_compared", 0) + len(got.token_ids)
    case.facts["drafted"] = case.facts.get("drafted", 0) + got.metrics.drafted
    case.facts["accepted"] = case.facts.get("accepted", 0) + got.metrics.accepted


def _verdict(case: Case, tried: int) -> Evidence:
    if not case.facts.get("drafted"):
        raise Failure("nothing was drafted, so identity says nothing")
    return Evidence(tried, {"identical": f"{tried} / {tried}"})


@check(
    "R-01",
    tier="runtime",
    cost=18.0,
    rationale="The promise of the product: compression costs no token. Windows of another width run other kernels and take "
    "other branches.",
    origin="llama.cpp: 57 of 75 outputs differ at a verify width of 2; the promise of design section 2.",
    fix=_FIX,
)
def identity(case: Case) -> Evidence:
    """Output equals plain full-cache decoding bit for bit for windows 1, 2, 4 and 8, several prompts and budgets."""
    bench = Bench(case)
    sets = case.option_sets[:3]
    examples = [
        {"architecture": models.LLAMA, "window": window, "options": options, "tokens": tokens, "prompt": number}
        for window in (1, 2, 4, 8)
        for number, tokens in enumerate((bench.long, 37))
        for options in (sets if tokens == 37 or window == 4 else sets[:1])
    ]
    return _verdict(case, case.for_each(examples, lambda example: identical(case, example)))


@check(
    "R-09",
    tier="runtime",
    cost=25.0,
    rationale="Architectures differ in rotation, normalisation, scaling and windows; a fault may show on one of them only.",
    origin="Sliding windows and partial rotary embedding break methods that were tried on Llama.",
    fix=_FIX,
)
def every_architecture(case: Case) -> Evidence:
    """Output equals plain decoding bit for bit on random-weight models of every supported architecture."""
    skipped = []

    def body(example: Mapping[str, Any]) -> None:
        try:
            identical(case, example)
        except Skip as skip:
            skipped.append(skip.reason)

    long = Bench(case).long
    examples = [{"architecture": a, "window": 4, "options": {}, "tokens": long} for a in models.ARCHITECTURES]
    tried = case.for_each(examples, body)
    case.note("refused_here", skipped)
    return _verdict(case, tried - len(skipped))


@check(
    "R-10",
    tier="runtime",
    cost=8.0,
    rationale="Where two tokens nearly tie, one bit decides. A verifier that runs k rows with other arithmetic than one row "
    "flips a third of these tokens.",
    origin="One-forward verification flips 27 to 44 of 132 tokens on this fixture.",
    fix=_FIX,
)
def near_ties(case: Case) -> Evidence:
    """On the near-tie model, where one bit decides, output still equals plain decoding bit for bit."""
    bench = Bench(case, models.NEAR_TIE)
    examples: list[dict[str, Any]] = [
        {"architecture": models.NEAR_TIE, "window": window, "options": {}, "tokens": bench.long, "prompt": n, "new": 40}
        for window in (2, 5, 8)
        for n in (0, 1)
    ]
    tried = case.for_each(examples, lambda example: identical(case, example))
    margins = []
    for number in (0, 1):
        logits = bench.plain(bench.prompt(bench.long, number), greedy(40)).logits
        margins += [] if logits is None else [_margin(row) for row in logits]
    ties = sum(margin < 1e-4 for margin in margins)
    if ties < len(margins) // 4:
        raise Failure(f"only {ties} of {len(margins)} positions of the fixture are near ties, so the check says little")
    case.note("near_ties", ties)
    return _verdict(case, tried)


def _margin(row: torch.Tensor) -> float:
    top = torch.topk(row.float(), 2).values
    return float(top[0] - top[1]) / float(row.float().abs().max())


@check(
    "R-11",
    tier="runtime",
    cost=12.0,
    rationale="Two paths of one program may share a bug. A loop without any of its code must agree, or differ only where two "
    "tokens tie.",
    origin="Losslessness claimed from metrics, or against a baseline with other stop rules.",
    fix=_FIX,
)
def independent_loop(case: Case) -> Evidence:
    """Tokens equal those of an independent loop over whole forwards, except within a stated margin."""
    worst = 0.0

    def body(example: Mapping[str, Any]) -> None:
        nonlocal worst
        bench = Bench(case, example["architecture"])
        prompt = bench.prompt(example["tokens"])
        with bench.engine() as engine:
            got = bench.run(engine, prompt, greedy(TOKENS))
        if got.error is not None or got.metrics.degraded:
            raise Failure(f"{example['architecture']}: the run failed: {got.error or got.metrics.degraded[0]}")
        tokens, rows = reference.greedy(bench.twin(), prompt, TOKENS)
        at = first_difference(tokens, got.token_ids)
        if at is not None:
            facts = {"position": len(prompt) + at, **margin_facts(rows[at], tokens[at], got.token_ids[at])}
            share = facts["top2_margin"] / float(rows[at].abs().max())
            if share > REFERENCE_BOUND or got.token_ids[at] not in torch.topk(rows[at], 2).indices.tolist():
                what = f"{example['architecture']}: differs from the independent loop at index {at}, margin {share:.2g}"
                raise Failure(what, facts={"mismatch": {"token_index": at, **facts}})
        exact = reference.forced(bench.twin(), prompt, got.token_ids)
        best, chosen = exact.max(-1), exact.gather(1, torch.tensor(got.token_ids)[:, None])[:, 0]
        share = float(((best.values - chosen) / exact.abs().amax(-1)).max())
        worst = max(worst, share)
        if share > REFERENCE_BOUND:
            raise Failure(f"{example['architecture']}: a token is {share:.2g} below the best logit of an independent forward")

    names = (models.LLAMA, "qwen3", "gemma3", models.NEAR_TIE)
    long = Bench(case).long
    tried = case.for_each([{"architecture": name, "tokens": long} for name in names], body)
    return Evidence(tried, {"worst_margin": worst, "bound": REFERENCE_BOUND})


@check(
    "R-12",
    tier="runtime",
    cost=6.0,
    rationale="Sampled output is promised too: with a seed, it is that of the full cache, draw for draw.",
    origin="Drafts sampled with other filters than the target; verification by argmax while sampling.",
    fix=_FIX,
)
def seeded_sampling(case: Case) -> Evidence:
    """Sampled output with a seed equals that of the full cache bit for bit, with penalties and filters too."""
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.8, "seed": 1},
        {"temperature": 1.2, "seed": 2, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.7, "seed": 3, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram": 3},
    ]
    long = Bench(case).long
    examples = [
        {"architecture": models.LLAMA, "window": 4, "options": {}, "tokens": long, "sampling": sampling}
        for sampling in samplings
    ]
    return _verdict(case, case.for_each(examples, lambda example: identical(case, example)))


@check(
    "R-04",
    tier="runtime",
    cost=8.0,
    rationale="A drafter may be always right or always wrong. Output must not depend on it, and counters must tell the truth.",
    origin="External drafters whose tokens bypass verification: accuracy fell as they got busier.",
    fix=_FIX,
)
def scripted_drafts(case: Case) -> Evidence:
    """Drafts all right, all wrong, alternating: output unchanged, and the counters equal the script."""
    bench = Bench(case)
    prompt, params = bench.prompt(bench.long), greedy(TOKENS)
    expected = bench.plain(prompt, params)
    scripts = {"all right": lambda _: False, "all wrong": lambda _: True, "every second wrong": lambda index: index % 2 == 1}

    def body(example: Mapping[str, Any]) -> None:
        with bench.engine(window=example["window"]) as engine, spied(script=bench.script(expected, scripts[example["script"]])):
            got = bench.run(engine, prompt, params)
        require_same(expected, got, f"drafts {example['script']}")
        metrics = got.metrics
        if not metrics.drafted or not metrics.rounds:
            raise Failure("nothing was drafted")
        right = {"all right": metrics.drafted, "all wrong": 0}.get(example["script"])
        if right is not None and metrics.accepted != right:
            raise Failure(f"drafts {example['script']}: {metrics.accepted} of {metrics.drafted} are counted as accepted")
        if example["script"] == "every second wrong" and max(metrics.accepted_per_round) > 1:
            raise Failure("more drafts in a row are counted as accepted than were right")
        if sum(metrics.accepted_per_round) != metrics.accepted or sum(metrics.drafted_per_round) != metrics.drafted:
            raise Failure("the counts by round do not add up to the totals")

    examples = [{"script": name, "window": window} for name in scripts for window in (3, 8)]
    return Evidence(case.for_each(examples, body))


@check(
    "R-05",
    tier="runtime",
    cost=6.0,
    rationale="An end inside an accepted block must end the output there. Otherwise text runs on, or a limit is overstepped.",
    origin="fak #13148; assisted decoding that looks at the last token of a block only.",
    fix=_FIX,
)
def ends_inside_blocks(case: Case) -> Evidence:
    """An ending token or the length limit inside an accepted block ends the output exactly there."""
    bench = Bench(case)
    prompt = bench.prompt(61)
    expected = bench.plain(prompt, greedy(TOKENS))
    tokens = expected.token_ids
    endings = [{"stop": index} for index in range(12)] + [{"limit": limit} for limit in (1, 2, 3, 4, 5, 9)]

    def body(example: Mapping[str, Any]) -> None:
        if "stop" in example:
            stop = tokens[example["stop"]]
            params, cut, reason = greedy(TOKENS, stop_token_ids=(stop,)), tokens.index(stop) + 1, "stop"
        else:
            params, cut, reason = greedy(example["limit"]), example["limit"], "length"
        with bench.engine(window=7) as engine, spied(script=bench.script(expected, lambda _: False)):
            got = bench.run(engine, prompt, params)
        if got.error is not None or got.metrics.degraded:
            raise Failure(f"the run failed: {got.error or got.metrics.degraded[0]}")
        if got.token_ids != tokens[:cut] or got.finish_reason != reason:
            raise Failure(f"{len(got.token_ids)} tokens, ended by {got.finish_reason!r}; {cut} and {reason!r} are right")

    return Evidence(case.for_each(endings, body))


@check(
    "R-15",
    tier="runtime",
    cost=8.0,
    capability="extend",
    rationale="Answers are long. Tokens that are folded into the compressed region must neither change the output nor bring "
    "the bytes back.",
    origin="Caches that are never compressed again after prefill; counters that drift apart from rows.",
    fix="extend must append to what it was given; see C-10, C-15 and C-19.",
)
def folding(case: Case) -> Evidence:
    """Over a longer answer the tail is folded in again and again: same output, and the compressor stays in use."""
    bench = Bench(case)
    examples = [
        {
            "architecture": models.LLAMA,
            "window": 4,
            "options": options,
            "tokens": bench.long,
            "new": 90,
            "config": {"fold": fold},
        }
        for options, fold in ((case.option_sets[-1], 16), ({}, 31))
    ]
    return _verdict(case, case.for_each(examples, lambda example: identical(case, example)))

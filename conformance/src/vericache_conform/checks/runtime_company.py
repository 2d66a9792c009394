"""In company: tiers, other requests, the model itself. None of it may show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vericache_conform.bench import Bench, Seen, greedy, spied
from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.mismatch import require_same
from vericache_conform.outcome import Evidence, Failure
from vericache_conform.stored import tensor_bytes

_FIX = "Nothing of this is the compressor's business: look for state outside of it, then report a bug of the runtime."

Rounds = Mapping[tuple[tuple[int, ...], int], Sequence[int]]


@check(
    "R-06",
    tier="runtime",
    cost=6.0,
    rationale="The full cache rests elsewhere and comes back for each verify. Every bit has to survive that, and the device "
    "must really hold less meanwhile.",
    origin="Offload races and lossy codecs for the authoritative copy.",
    fix=_FIX,
)
def swapping(case: Case) -> Evidence:
    """With the full cache on host or disk, output is the same and the peak of device memory falls."""
    bench = Bench(case)
    prompt, params = bench.prompt(bench.long), greedy(24)
    expected = bench.plain(prompt, params)
    peaks: dict[str, int] = {}

    def body(example: Mapping[str, Any]) -> None:
        tier = example["full_kv"]
        with bench.engine(full_kv=tier) as engine:
            got = bench.run(engine, prompt, params)
        require_same(expected, got, f"full cache on {tier}")
        peaks[tier] = got.metrics.peak_device_kv_bytes
        if tier != "device" and not got.metrics.swap_bytes:
            raise Failure(f"full cache on {tier}: nothing was swapped in")
        if "device" in peaks and tier != "device" and peaks[tier] >= peaks["device"]:
            raise Failure(
                f"full cache on {tier}: {peaks[tier]} bytes at most on the device, {peaks['device']} without offloading"
            )

    tried = case.for_each([{"full_kv": tier} for tier in ("device", "host", "disk")], body)
    return Evidence(tried, {"peak_device_bytes": peaks})


@check(
    "R-07",
    tier="runtime",
    cost=8.0,
    rationale="A step carries rows of several requests in several phases. What one gets must not depend on the others, nor "
    "must how well its drafts fare.",
    origin="ComfyUI #15698; ragged batches where rejected rows still take part in softmax.",
    fix="Compute from the one prefix you were given (C-08); then look at the runtime.",
)
def ragged_company(case: Case) -> Evidence:
    """Prompts of different lengths together, prefilled in chunks, give what each gives alone, accepted drafts included."""
    bench = Bench(case)
    prompts = [bench.prompt(tokens, number) for number, tokens in enumerate((bench.long, 3, 37, bench.long - 21))]
    params = [greedy(24), greedy(9), greedy(20, temperature=0.9, seed=4), greedy(24)]

    def body(example: Mapping[str, Any]) -> None:
        order = example["order"]
        alone, lonely, company = [], Seen(), Seen()
        for number in order:
            with bench.engine() as engine, spied(lonely):
                alone.append(bench.run(engine, prompts[number], params[number]))
        with bench.engine() as engine, spied(company):
            together = engine.generate([prompts[n] for n in order], [params[n] for n in order], record_logits=True)
        for number, one, other in zip(order, alone, together, strict=True):
            require_same(bench.plain(prompts[number], params[number]), one, f"request {number} alone")
            require_same(one, other, f"request {number} in company")
            same_drafts(f"request {number}", tuple(prompts[number]), lonely.rounds, company.rounds)

    return Evidence(case.for_each([{"order": [0, 1, 2, 3]}, {"order": [3, 2, 0, 1]}], body))


def same_drafts(name: str, prompt: tuple[int, ...], alone: Rounds, company: Rounds) -> None:
    """Compare what was drafted from the same place.

    Rows are shared in company: a round may get fewer of them, and the next one then starts elsewhere. That is no fault.
    """
    mine, theirs = ({start: drafts for (of, start), drafts in seen.items() if of == prompt} for seen in (alone, company))
    common = sorted(set(mine) & set(theirs))
    if mine and not common:
        raise Failure(f"{name} drafted {len(mine)} times alone, but never from the same place in company")
    for start in common:
        if any(one != other for one, other in zip(mine[start], theirs[start], strict=False)):
            raise Failure(f"{name} drafts other tokens in company after {start}: {theirs[start]}, alone {mine[start]}")


@check(
    "R-14",
    tier="runtime",
    cost=4.0,
    rationale="Compressing must not touch the model: an evictor that changes the prompt's logits, leaves hooks or patches a "
    "forward changes every later request.",
    origin="Presses that register hooks and patch attention; the prompt's logits must not change with any evictor.",
    fix="Read queries and scores from the context instead of hooking the model.",
)
def model_untouched(case: Case) -> Evidence:
    """The prompt's logits, the weights, the hooks and the forward functions of the model stay as they were."""
    from vericache_conform.look import snapshot

    bench = Bench(case)
    prompt = bench.prompt(bench.long)
    expected = bench.plain(prompt, greedy(12))

    def state() -> list[Any]:
        weights = [tensor_bytes(part) for part in bench.model.state_dict().values()]
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), "forward" in vars(m)) for m in bench.model.modules()]  # noqa: SLF001
        return [weights, hooks]

    def body(example: Mapping[str, Any]) -> None:
        with bench.engine(example["options"]) as engine:
            before, world = state(), snapshot()
            seen_before = world["global forward hooks of torch"]
            got = bench.run(engine, prompt, greedy(12))
            after = snapshot()
        if state() != before:
            raise Failure("weights, hooks or forward functions of the model changed")
        changed = [name for name in world if after[name] != world[name]]
        if changed:
            raise Failure(f"a run with the compressor changed: {', '.join(changed)}")
        del seen_before
        require_same(expected, got, "logits of prompt and answer")

    return Evidence(case.for_each([{"options": options} for options in case.option_sets[:2]], body))

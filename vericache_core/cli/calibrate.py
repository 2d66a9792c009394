"""``vericache calibrate``: measure what steps and swaps cost here and how well compressors draft, before serving."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from vericache_core.cli.engine_args import add_engine_arguments, config_from_args, registry_from_args, setting_from_text
from vericache_core.cli.output import note, print_json, print_table
from vericache_core.errors import UsageError

if TYPE_CHECKING:
    from vericache_core.runtime.calibration import Calibration
    from vericache_core.runtime.hazard import Prior

DRAFTED = 8
"""Window of the runs that measure acceptance."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file, the compressors, and the engine's arguments."""
    parser.add_argument("file", metavar="FILE", help="where the calibration is written; give it to calibration=FILE later")
    parser.add_argument(
        "--acceptance",
        action="append",
        metavar="NAME[:KEY=VALUE,...]",
        help="a compressor whose acceptance is measured, too (repeatable)",
    )
    parser.add_argument("--context", type=int, default=1500, metavar="N", help="tokens of its prompts [%(default)s]")
    parser.add_argument("--new-tokens", type=int, default=48, metavar="N", help="tokens to generate for it [%(default)s]")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, write the file, show what was found."""
    if min(args.context, args.new_tokens) < 2:
        raise UsageError("--context and --new-tokens: expected at least 2")
    config = config_from_args(args)
    registry = registry_from_args(args, config)
    wanted = [setting_from_text(text, registry, "--acceptance") for text in args.acceptance or ()]

    from vericache_core.config import replace
    from vericache_core.engine import Engine
    from vericache_core.runtime.calibration import Calibration, prior_key
    from vericache_core.runtime.measure import fingerprint, measure

    alone: dict[str, Any] = {"compressor": None, "keep": None, "keep_tokens": None, "options": {}, "calibration": None}
    # On the device and with no store elsewhere: what is measured is this machine, and every tier of it.
    plain = replace(config, **alone, window=DRAFTED, mode="pinned", full_kv="device", remote=None, prefix_store=None)
    priors: dict[str, Prior] = {}
    with Engine.from_pretrained(args.model, plain) as engine:
        note("measuring steps and swaps")
        costs = measure(engine.adapter, engine.attend, config.swap_dir, repeats=5).limited(config.link_bytes_per_s)
        made = Calibration(fingerprint(engine.adapter), costs, priors, config.link_bytes_per_s)
        for name, options in wanted:
            note(f"measuring acceptance of {name}")
            own = replace(plain, compressor=name, options=options)
            with Engine(engine.adapter.model, engine.tokenizer, replace(own, probe=False)) as drafter:
                priors[prior_key(name, own.compressor_options())] = _acceptance(drafter, args.context, args.new_tokens)
    made.save(args.file)
    _show(made, args.file, json=args.json)
    return 0


def _acceptance(engine: Any, context: int, new_tokens: int) -> Prior:
    """Hazard over the prompts of ``vericache bench compressors``."""
    from vericache_core.bench.prompts import build_prompts
    from vericache_core.runtime.hazard import HazardEstimate, Prior
    from vericache_core.runtime.sampling_params import SamplingParams

    estimate = HazardEstimate(memory=1e9)
    prompts = build_prompts(engine.tokenizer, engine.adapter.vocab_size, context)
    for output in engine.generate([list(p.token_ids) for p in prompts], SamplingParams(max_new_tokens=new_tokens)):
        if output.error is not None:
            raise output.error
        for drafted, accepted in zip(output.metrics.drafted_per_round, output.metrics.accepted_per_round, strict=True):
            estimate.observe(drafted, accepted)
    learnt = estimate.learnt
    return Prior(min(0.999, max(0.001, learnt.hazard)), learnt.weight)


def _show(made: Calibration, file: str, *, json: bool) -> None:
    costs = made.costs
    if json:
        priors = {key: {"hazard": prior.hazard, "weight": prior.weight} for key, prior in made.priors.items()}
        print_json("vericache.calibrate/1", {"file": file, "costs": costs.to_json(), "priors": priors})
        return
    rows = [[f"step of {shape} rows", f"{seconds * 1e3:.2f} ms"] for shape, seconds in costs.shapes.items()]
    rows.append(["KV read by attention", f"{1e-9 / costs.read:.1f} GB/s" if costs.read else "free"])
    rows.append(["a row of a block against 1,000 cached tokens", f"{costs.pair * 1e6:.3f} ms"])
    rows += [
        [f"swap from {tier}", f"{1e-9 / link.seconds_per_byte:.1f} GB/s"]
        for tier, link in costs.links.items()
        if link.seconds_per_byte
    ]
    rows += [[f"hazard of {key}", f"{prior.hazard:.3f}"] for key, prior in made.priors.items()]
    print_table(["COST", "VALUE"], rows)
    note(f"written to {file}")

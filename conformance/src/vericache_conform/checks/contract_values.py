"""What quantization does to rows: something, and not too much."""

from __future__ import annotations

from typing import Any

import torch

from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure, Skip
from vericache_conform.stored import dense_rows, stored_layers
from vericache_conform.world import World
from vericache_core.coded import CodedLayer


@check(
    "C-12",
    tier="contract",
    kinds=["quantization", "hybrid"],
    cost=1.0,
    rationale="An error of zero means that nothing was quantized and the saving is a label; an error as large as the rows "
    "means that drafts come from noise.",
    origin="VeloxQuant #163 (exact by accident: one-token groups have min == max); PyPI turboquant 0.2.0's scaling.",
    fix="Compare with a scalar implementation of the paper. Declare your bound as `[declared] max_relative_error` in "
    "conformance.toml; without one the bound is 1, the error of storing zeros.",
)
def quantization_error(case: Case) -> Evidence:
    """The error of encoded rows is above zero and within the declared bound, on friendly and on adversarial rows."""
    bound = float(case.declared.get("max_relative_error", 1.0))
    worst = 0.0

    def body(example: dict[str, Any]) -> None:
        nonlocal worst
        compressor = case.create(example["options"])
        layers, tokens = case.layers(example["options"]), case.length
        world = World(layers, tokens, case.seed, example["flavour"])
        compressed = case.compress(compressor, world, tokens)
        for index, layer in stored_layers(compressed):
            rows = dense_rows(layer)
            if rows is None:
                raise Skip(f"{type(layer).__name__} has no rows to look at", declared=False)
            for part in (0, 1):
                encoded = tokens
                if isinstance(layer, CodedLayer):
                    encoded = (layer.values if part else layer.keys).encoded_tokens
                source = (world.values if part else world.keys)[index]
                name = f"{'values' if part else 'keys'} of layer {index}"
                for head, pair in enumerate(rows):
                    at = layer.surviving.head(head)
                    want, got = source[head][at].float(), pair[part].float()
                    if not torch.equal(want[encoded:], got[encoded:]):
                        raise Failure(f"{name}: rows in the exact region are not exact")
                    size = float(want[:encoded].norm())
                    error = float((want - got)[:encoded].norm()) / size if size else 0.0
                    worst = max(worst, error)
                    if error > bound:
                        raise Failure(
                            f"{name}: relative error {error:.3f} on {example['flavour']} rows, the bound is {bound:g}"
                        )
                    if encoded and example["flavour"] == "normal" and error == 0.0:
                        raise Failure(f"{name}: {encoded} tokens are said to be encoded, but come back exactly")

    examples = [
        {"options": options, "flavour": flavour}
        for options in case.option_sets
        for flavour in ("normal", "constant", "alternating", "one-hot", "shifted", "zeros")
    ]
    tried = case.for_each(examples, body)
    return Evidence(tried, {"worst_relative_error": round(worst, 5), "bound": bound})

"""What a query reads from the compressed prefix: the rows that the map names, all of them, and no others."""

from __future__ import annotations

from typing import Any

import torch

from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure, Skip
from vericache_conform.stored import attend, dense_rows, softmax_attention, stored_layers
from vericache_conform.world import World

TOLERANCE = 1e-5


@check(
    "C-18",
    tier="contract",
    cost=1.0,
    rationale="Drafts are only as good as the attention over the survivors. A mask that takes the newest rows instead of the "
    "kept ones, or a query rotated for another position, reads the wrong memory.",
    origin="VeloxQuant #370, #392 (mask shortcut); decode against the full cache with -inf on the complement must agree.",
    fix="Fold every stored row into the AttentionState once, unrotated; leave queries as they come.",
)
def mask_equivalence(case: Case) -> Evidence:
    """Attention over the compressed rows equals full attention with everything else masked, to 1e-5 in fp32."""
    worst = 0.0

    def body(example: dict[str, Any]) -> None:
        nonlocal worst
        compressor = case.create(example["options"])
        layers, tokens = case.layers(example["options"]), case.length
        world = World(layers, tokens + 11, case.seed)
        compressed = case.compress(compressor, world, tokens)
        if example["grow"]:
            compressed = case.extend(compressor, compressed, world, tokens + 11, tokens)
        for index, layer in stored_layers(compressed):
            descriptor, rows = layers[index], dense_rows(layer)
            if rows is None:
                raise Skip(f"{type(layer).__name__} has no rows to compare with")
            query = world.queries[index][:, -5:].float() * descriptor.scaling
            answer = attend(layer, query)
            for head in range(descriptor.heads):
                own = head // descriptor.group
                if case.subject.spec.kind == "token-drop":
                    hidden = torch.ones(layer.tokens, dtype=torch.bool)
                    hidden[layer.surviving.head(own)] = False
                    keys, values = (part[index][own, : layer.tokens] for part in (world.keys, world.values))
                    expected = softmax_attention(query[head], keys, values, hidden)
                else:
                    expected = softmax_attention(query[head], *rows[own])
                error = float((answer[head].double() - expected).abs().max() / max(1.0, float(expected.abs().max())))
                worst = max(worst, error)
                if not error <= TOLERANCE:
                    raise Failure(
                        f"layer {index}, head {head}: attention over the compressed rows is off by {error:.2g}",
                        facts={"tolerance": TOLERANCE},
                    )

    grows = [False] if case.subject.spec.capability("extend") == "no" else [False, True]
    examples = [{"options": options, "grow": grow} for options in case.option_sets for grow in grows]
    return Evidence(case.for_each(examples, body), {"worst_error": worst})

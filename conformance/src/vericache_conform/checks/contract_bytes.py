"""Bytes: what is reported is what is held."""

from __future__ import annotations

from typing import Any

from vericache_conform.case import Case
from vericache_conform.check import check
from vericache_conform.outcome import Evidence, Failure
from vericache_conform.stored import reachable_tensors, storage_total, stored_layers
from vericache_conform.world import World
from vericache_core.kv import CompressedKV

SLACK = 1.1
"""Storages may be a tenth larger than their tensors; beyond that a view keeps a larger tensor alive."""


@check(
    "C-11",
    tier="contract",
    cost=0.7,
    rationale="Bytes are the whole point. A figure that leaves out scales, or a small view of a large tensor, fills the device "
    "while the report says otherwise.",
    origin="VeloxQuant #163; head-wise presses of kvpress that mask and do not shrink.",
    fix="Put everything that grows with tokens into `tensors()` (scales, zero points, norms, residuals), and clone slices.",
)
def reported_bytes(case: Case) -> Evidence:
    """Reported bytes equal the storage held: scales and maps included, storage and not view, nothing hidden."""

    def body(example: dict[str, Any]) -> None:
        compressor, layers = case.create(example["options"]), case.layers(example["options"])
        hidden = []
        for tokens in (case.length, 2 * case.length):
            world = World(layers, tokens, case.seed)
            compressed = case.compress(compressor, world, tokens)
            _measured(compressed)
            known = set()
            for _, layer in stored_layers(compressed):
                listed = [*layer.tensors().values(), *layer.surviving.storage()]
                known |= {tensor.untyped_storage().data_ptr() for tensor in listed if tensor.numel()}
            rest = {at: tensor for at, tensor in reachable_tensors(compressed.layers).items() if at not in known}
            hidden.append(storage_total(rest.values()))
            full = sum(layer.token_bytes for layer in layers) * tokens
            case.note(f"bytes_share_{tokens}", round(compressed.nbytes / full, 4))
        if hidden[1] > hidden[0]:
            raise Failure(
                f"{hidden[1]} bytes that grow with the prefix are held and not listed in tensors()", facts={"hidden": hidden}
            )

    return Evidence(case.for_each([{"options": options} for options in case.option_sets], body), dict(case.facts))


def _measured(compressed: CompressedKV) -> None:
    everything = []
    for index, layer in stored_layers(compressed):
        listed = [*layer.tensors().values(), *layer.surviving.storage()]
        everything += listed
        held, needed = storage_total(listed), sum(tensor.numel() * tensor.element_size() for tensor in listed)
        if layer.nbytes != held:
            raise Failure(f"layer {index} reports {layer.nbytes} bytes, its tensors and map hold {held}")
        if held > needed * SLACK + 64:
            raise Failure(f"layer {index} keeps storages of {held} bytes alive for tensors of {needed}: clone what you keep")
    if compressed.nbytes != storage_total(everything):
        raise Failure(f"{compressed.nbytes} bytes are reported in all, the layers hold {storage_total(everything)}")

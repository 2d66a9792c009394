from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from tests.sdk.making import cache, descriptor, stored_bytes, view
from vericache_core.context import CompressContext
from vericache_core.errors import PayloadError, UnknownCompressorError
from vericache_core.kv import CompressedKV, PlainLayer
from vericache_core.payload import MAGIC, descriptor_from_json, descriptor_to_json, dump_compressed, load_compressed
from vericache_core.plugins.registry import default_registry

LAYERS = [
    descriptor(0),
    descriptor(1, window=8),
    descriptor(2, kv_heads=1, head_dim=8, value_dim=12, dtype=torch.bfloat16),
    descriptor(3, dtype=torch.float16),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("identity", {}),
    ("random", {}),
    ("random", {"keep": 0.5, "seed": 9}),
    ("random", {"keep_tokens": 1}),
    ("adversarial", {}),
    ("adversarial", {"seed": 3}),
]


def compressed(name: str = "random", options: Mapping[str, Any] | None = None, tokens: int = 67) -> CompressedKV:
    compressor = default_registry().create(name, options or {})
    kv = cache(LAYERS, tokens)
    first = compressor.compress(view(LAYERS, kv, 0, tokens - 7), CompressContext())
    return compressor.extend(first, view(LAYERS, kv, tokens - 7, tokens), CompressContext())


@pytest.mark.parametrize(("name", "options"), CASES)
def test_round_trip(name: str, options: dict[str, Any]) -> None:
    made = compressed(name, options)
    data = made.to_payload()
    again = CompressedKV.from_payload(data)
    assert stored_bytes(again) == stored_bytes(made)
    assert (again.compressor, dict(again.options), again.descriptors) == (name, dict(made.options), made.descriptors)
    assert (again.surviving, again.nbytes) == (made.surviving, made.nbytes)
    assert again.to_payload() == data
    assert b"pickle" not in data


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_same_bytes_every_time_and_for_views(name: str, options: dict[str, Any]) -> None:
    assert compressed(name, options).to_payload() == compressed(name, options).to_payload()


CHILD = """
import sys, torch
torch.set_num_threads(int(sys.argv[1])); torch.manual_seed(99); torch.rand(7)
sys.path.insert(0, sys.argv[2])
from tests.sdk.test_payload import CASES, compressed
from vericache_core.kv import CompressedKV
for name, options in CASES:
    length = int.from_bytes(sys.stdin.buffer.read(8), "little")
    data = sys.stdin.buffer.read(length)
    again = CompressedKV.from_payload(data)
    again.check_integrity()
    assert again.to_payload() == data, name
    assert compressed(name, options).to_payload() == data, name
print("equal")
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fresh_process_reads_and_makes_the_same_bytes(threads: int, pytestconfig: pytest.Config) -> None:
    stream = b""
    for name, options in CASES:
        data = compressed(name, options).to_payload()
        stream += len(data).to_bytes(8, "little") + data
    command = [sys.executable, "-c", CHILD, str(threads), str(pytestconfig.rootpath)]
    child = subprocess.run(command, input=stream, capture_output=True, check=False)
    assert child.stdout.strip() == b"equal", child.stderr.decode()


def test_views_of_one_large_tensor_are_written_alone() -> None:
    made = compressed("identity")
    big = torch.randn(10_000, 16)
    layer = made.layers[0]
    assert layer is not None
    small = PlainLayer(big[:134], big[:134], layer.surviving)
    data = dump_compressed(CompressedKV("identity", {}, 67, (LAYERS[0],), (small,)))
    assert len(data) < 40_000
    again = load_compressed(data).layers[0]
    assert isinstance(again, PlainLayer)
    assert torch.equal(again.flat_keys, big[:134])


@given(st.data())
def test_no_damage_goes_unnoticed(data: st.DataObject) -> None:
    good = compressed("random", tokens=20).to_payload()
    kind = data.draw(st.sampled_from(["cut", "flip", "grow"]))
    if kind == "cut":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    elif kind == "grow":
        bad = good + data.draw(st.binary(min_size=1, max_size=9))
    else:
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ 1 << data.draw(st.integers(0, 7))]) + good[at + 1 :]
    with pytest.raises(PayloadError):
        CompressedKV.from_payload(bad)


def forged(change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None], name: str = "random") -> bytes:
    """A payload with a right digest whose content was changed."""
    body = compressed(name).to_payload()[len(MAGIC) + 32 :]
    length = int.from_bytes(body[:8], "little")
    header = json.loads(json.loads(body[8 : 8 + length])["__metadata__"]["vericache"])
    tensors = load_tensors(body)
    change(header, tensors)
    body = save_tensors(tensors, {"vericache": json.dumps(header)})
    return MAGIC + hashlib.sha256(body).digest() + body


FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = {
    "format": lambda h, t: h.update(format=2),
    "extra of another version": lambda h, t: h.update(extra={"algorithm": 7}),
    "tokens": lambda h, t: h.update(tokens=66),
    "tokens of the wrong type": lambda h, t: h.update(tokens="67"),
    "no compressor": lambda h, t: h.pop("compressor"),
    "unknown option": lambda h, t: h["options"].update(bogus=1),
    "option out of range": lambda h, t: h["options"].update(keep=7),
    "layers is text": lambda h, t: h.update(layers="nothing"),
    "layer is text": lambda h, t: h.update(layers=["nothing"]),
    "unknown dtype": lambda h, t: h["layers"][0]["descriptor"].update(dtype="int3"),
    "descriptor with more": lambda h, t: h["layers"][0]["descriptor"].update(more=1),
    "head_dim": lambda h, t: h["layers"][0]["descriptor"].update(head_dim=17),
    "fewer counts": lambda h, t: h["layers"][0].update(counts=[24]),
    "other counts": lambda h, t: h["layers"][0].update(counts=[23, 22]),
    "no keys": lambda h, t: t.pop("0/data/keys"),
    "no map": lambda h, t: t.pop("0/map/bits"),
    "fewer rows": lambda h, t: t.update({"0/data/keys": t["0/data/keys"][1:].clone()}),
    "another dtype": lambda h, t: t.update({"0/data/keys": t["0/data/keys"].half()}),
    "another bit": lambda h, t: t["0/map/bits"].bitwise_xor_(1),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_payload_is_refused(name: str) -> None:
    with pytest.raises(PayloadError):
        CompressedKV.from_payload(forged(FORGERIES[name]))


CODE_FORGERIES: dict[str, Callable[[dict[str, Any], dict[str, torch.Tensor]], Any]] = {
    "no codes": lambda h, t: t.pop("0/data/keys.0.lot"),
    "fewer codes": lambda h, t: t.update({"0/data/keys.0.lot": t["0/data/keys.0.lot"][:, 1:].clone()}),
    "codes of another dtype": lambda h, t: t.update({"0/data/keys.0.lot": t["0/data/keys.0.lot"].int()}),
    "codes of another name": lambda h, t: t.update({"0/data/keys.0.lots": t.pop("0/data/keys.0.lot")}),
    "segment lengths": lambda h, t: h["layers"][0]["meta"].update(keys=[66]),
    "segment of nothing": lambda h, t: (
        h["layers"][0]["meta"].update(keys=[67, 0]),
        t.update({"0/data/keys.1.lot": t["0/data/keys.0.lot"][:, :0].clone()}),
    ),
    "exact rows of another width": lambda h, t: t.update({"0/data/keys.exact": torch.zeros(2, 0, 15)}),
}


@pytest.mark.parametrize("name", CODE_FORGERIES)
def test_forged_codes_are_refused(name: str) -> None:
    with pytest.raises(PayloadError):
        CompressedKV.from_payload(forged(CODE_FORGERIES[name], "adversarial"))


def test_an_unchanged_forgery_is_fine() -> None:
    for name in ("random", "adversarial"):
        CompressedKV.from_payload(forged(lambda h, t: None, name)).check_integrity()


def test_a_compressor_that_is_not_installed_is_named() -> None:
    with pytest.raises(UnknownCompressorError, match="nowhere"):
        CompressedKV.from_payload(forged(lambda h, t: h.update(compressor="nowhere")))


def test_descriptors_round_trip() -> None:
    for layer in LAYERS:
        assert descriptor_from_json(json.loads(json.dumps(descriptor_to_json(layer)))) == layer

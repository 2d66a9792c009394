from __future__ import annotations

import ast
import hashlib
import json
import os
import pickle
import struct
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import vericache_core
from tests.fault_table import Tally
from tests.stores.support import IDENTITY, changed, joined
from vericache_core.errors import PayloadError
from vericache_core.payload import read_payload
from vericache_core.stores.format import (
    MAGIC,
    BlobHeader,
    TensorSpec,
    compressed_header,
    decode_blob,
    decode_tensors,
    encode_blob,
    encode_tensors,
    full_header,
)

KEY = "full-" + "0" * 64
HEADER = full_header(IDENTITY, KEY, 3, 128)
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def raw(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data)


def blob(header: BlobHeader = HEADER) -> bytes:
    return joined(encode_blob(header, [b"some", b" rows"]))


def test_a_blob_comes_back_where_it_lies() -> None:
    made = blob()
    payload = decode_blob(memoryview(made), HEADER)
    assert bytes(payload) == b"some rows"
    assert payload.obj is made


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_pattern_survives(dtype: str) -> None:
    spec = TensorSpec(dtype, (3, 2, 8))
    data = os.urandom(spec.nbytes)  # NaN payloads, infinities, -0.0 and denormals among them
    ours = joined(encode_tensors({"0/keys": (spec, data)}))
    assert bytes(decode_tensors(memoryview(ours), {"0/keys": spec})["0/keys"]) == data
    theirs = safetensors.torch.load(ours)["0/keys"]
    assert theirs.dtype == DTYPES[dtype]
    assert bytes(raw(theirs)) == data


def test_files_of_the_library_are_read() -> None:
    tensors = {"a": torch.randn(2, 5), "b": torch.randn(3).bfloat16()}
    file = safetensors.torch.save(tensors, {"note": "x"})
    found = decode_tensors(memoryview(file), {"a": TensorSpec("F32", (2, 5)), "b": TensorSpec("BF16", (3,))})
    assert {name: bytes(part) for name, part in found.items()} == {name: bytes(raw(part)) for name, part in tensors.items()}


@pytest.mark.fault("flip", "each bit of a blob, and each cut")
def test_every_flipped_bit_and_every_truncation_is_refused(tally: Tally) -> None:
    made = blob()
    tally.add(len(made) * 9 + 1)  # a byte has eight bits, and each is once the first that is missing
    for at in range(len(made) * 8):
        broken = bytearray(made)
        broken[at // 8] ^= 1 << at % 8
        with pytest.raises(PayloadError):
            decode_blob(memoryview(broken), HEADER)
    for length in range(len(made)):
        with pytest.raises(PayloadError):
            decode_blob(memoryview(made[:length]), HEADER)
    with pytest.raises(PayloadError, match="too long"):
        decode_blob(memoryview(made + b"x"), HEADER)


def _patched(change: Callable[[dict[str, Any]], object]) -> bytes:
    """A blob with another header and checksums that fit it: what an attacker or a bug could write."""
    made = blob()
    (length,) = struct.unpack_from("<I", made, 8)
    plain = json.loads(made[44 : 44 + length])
    change(plain)
    text = json.dumps(plain).encode()
    return MAGIC + struct.pack("<I", len(text)) + hashlib.sha256(text).digest() + text + made[44 + length :]


@pytest.mark.fault("header", "each field another value")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 2),
        ("role", "compressed"),
        ("key", "full-" + "1" * 64),
        ("chunk", 4),
        ("tokens", 127),
        ("codec", {"id": "kivi", "options": {}}),
        ("codec", {"id": "raw", "options": {"bits": 4}}),
        ("codec", None),
        ("identity", {}),
        ("payload", {"bytes": 9}),
        ("payload", {"bytes": 2**60, "sha256": hashlib.sha256(b"some rows").hexdigest()}),
        ("payload", []),
    ],
)
def test_each_header_field_is_compared(name: str, value: object) -> None:
    with pytest.raises(PayloadError) as caught:
        decode_blob(memoryview(_patched(lambda plain: plain.update({name: value}))), HEADER)
    assert name in str(caught.value)


@pytest.mark.fault("header", "each field left out")
@pytest.mark.parametrize("name", ["format", "role", "key", "identity", "chunk", "tokens", "codec", "payload"])
def test_each_header_field_must_be_there(name: str) -> None:
    with pytest.raises(PayloadError):
        decode_blob(memoryview(_patched(lambda plain: plain.pop(name))), HEADER)


@pytest.mark.fault("identity", "the header of a blob")
@pytest.mark.parametrize("field", sorted(IDENTITY.public()))
def test_a_blob_of_another_identity_is_refused(field: str) -> None:
    with pytest.raises(PayloadError, match="identity"):
        decode_blob(memoryview(blob(full_header(changed(field), KEY, 3, 128))), HEADER)


@pytest.mark.fault("compressor", "a lossy codec in the role of full KV")
def test_a_lossy_codec_can_neither_write_nor_read_full_kv() -> None:
    lossy = replace(HEADER, codec="kivi", options={"bits": 4})
    with pytest.raises(PayloadError, match="cannot be full KV"):
        encode_blob(lossy, [b"codes"])
    with pytest.raises(PayloadError, match="cannot be full KV"):
        decode_blob(memoryview(blob()), lossy)
    compressed = compressed_header(IDENTITY, "compressed-" + "0" * 64, 128, "kivi", {"bits": 4})
    under_a_full_key = joined(encode_blob(compressed, [b"codes"]))
    with pytest.raises(PayloadError, match="role"):
        decode_blob(memoryview(under_a_full_key), HEADER)
    for header in (replace(compressed, key=KEY), replace(compressed, codec="raw"), replace(HEADER, key=compressed.key)):
        with pytest.raises(PayloadError, match="namespace"):
            encode_blob(header, [])


SPECS = {"a": TensorSpec("F32", (2, 3)), "b": TensorSpec("F32", (2,))}


def _entry(spec: TensorSpec, start: Any, stop: Any) -> dict[str, Any]:
    return {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, stop]}


def _good() -> dict[str, Any]:
    return {"a": _entry(SPECS["a"], 0, 24), "b": _entry(SPECS["b"], 24, 32)}


@pytest.mark.fault("headers", "tables of tensors")
@pytest.mark.parametrize(
    "table",
    [
        {"a": _entry(SPECS["a"], 0, 24)},
        _good() | {"c": _entry(SPECS["b"], 0, 8)},
        _good() | {"b": _entry(SPECS["b"], 16, 24)},
        _good() | {"b": _entry(SPECS["b"], -8, 0)},
        _good() | {"b": _entry(SPECS["b"], 2**60, 2**60 + 8)},
        _good() | {"b": _entry(SPECS["b"], 24, 2**63)},
        _good() | {"b": _entry(SPECS["b"], 32, 24)},
        _good() | {"b": _entry(SPECS["b"], 24.0, 32)},
        _good() | {"b": _entry(SPECS["b"], True, 8)},
        _good() | {"b": _entry(TensorSpec("F16", (4,)), 24, 32)},
        _good() | {"b": _entry(TensorSpec("F32", (1, 2)), 24, 32)},
        _good() | {"b": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [24, 32]}},
        _good() | {"b": {"dtype": "Q9", "shape": [2], "data_offsets": [24, 32]}},
        _good() | {"b": {"dtype": "F32", "shape": [2]}},
        _good() | {"b": None},
        {"a": _entry(SPECS["a"], 8, 32), "b": _entry(SPECS["b"], 32, 40)},
    ],
)
def test_tensor_tables_that_lie_are_refused_before_anything_is_allocated(table: dict[str, Any]) -> None:
    text = json.dumps(table).encode()
    file = struct.pack("<Q", len(text)) + text + bytes(32)
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError):
            decode_tensors(memoryview(file), SPECS)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.fault("headers", "no table at all")
@pytest.mark.parametrize(
    "file",
    [
        b"",
        b"\x00" * 7,
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 9) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 2) + b"\xff\xfe",
        struct.pack("<Q", 20000) + b"[" * 20000,
        struct.pack("<Q", 21) + b'{"a":1,"a":2,"b":[]} ',
        struct.pack("<Q", 6000) + (b'{"a":' + b"9" * 5994 + b"}"),
    ],
)
def test_headers_that_are_no_table_are_refused(file: bytes) -> None:
    with pytest.raises(PayloadError):
        decode_tensors(memoryview(file), SPECS)


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.file, "executed"))


@pytest.mark.fault("pickle", "as a blob, in a blob, as a payload; any protocol")
def test_a_pickle_is_never_executed(tmp_path: Path, tally: Tally) -> None:
    canary = tmp_path / "canary"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        evil = pickle.dumps(Canary(canary), protocol)
        text = json.dumps({"payload": {"bytes": len(evil), "sha256": hashlib.sha256(evil).hexdigest()}}).encode()
        dressed = MAGIC + struct.pack("<I", len(text)) + hashlib.sha256(text).digest() + text + evil
        for attempt in (evil, dressed, joined(encode_blob(HEADER, [evil]))[:-1]):
            with pytest.raises(PayloadError):
                decode_blob(memoryview(attempt), HEADER)
        with pytest.raises(PayloadError):
            decode_tensors(decode_blob(memoryview(joined(encode_blob(HEADER, [evil]))), HEADER), SPECS)
        with pytest.raises(PayloadError):
            read_payload(evil)
        tally.add(5)
    assert not canary.exists()
    pickle.loads(evil)  # the canary does sing
    assert canary.read_text() == "executed"


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}


@pytest.mark.fault("pickle", "nothing in the sources could")
def test_nothing_in_the_package_can_unpickle() -> None:
    files = sorted(Path(vericache_core.__file__).parent.rglob("*.py"))
    assert len(files) > 100
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0]}
            else:
                called = node.func if isinstance(node, ast.Call) else None
                dotted = ast.unparse(called) if called is not None else ""
                assert dotted not in {"torch.load", "eval", "yaml.load", "numpy.load", "np.load"}, f"{file}: {dotted}"
                continue
            assert not names & FORBIDDEN, f"{file} imports {names & FORBIDDEN}"
    assert "pickle" in sys.modules  # others do import it; the check above is about our own source

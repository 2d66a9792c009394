from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.stores.support import IDENTITY, changed, tokens
from vericache_core.stores import identity
from vericache_core.stores.identity import PrefixIdentity, canonical, chain, compressed_key, digest, full_key, index_key

GOLDEN = Path(__file__).with_name("golden_keys.json")
SOURCE = Path(identity.__file__)
PRINT = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("identity", sys.argv[1])
module = importlib.util.module_from_spec(spec); sys.modules["identity"] = module; spec.loader.exec_module(module)
golden = json.load(open(sys.argv[2]))
made = []
for case in golden["cases"]:
    who = module.PrefixIdentity(**case["identity"])
    ids = case["tokens"]
    made.append({
        "root": who.root.hex(),
        "full": [module.full_key(link) for link in module.chain(who, ids, case["chunk"])],
        "compressed": module.compressed_key(
            who, ids, case["compressor"], case["options"], seed=case["seed"], protected=case["protected"]),
        "index": module.index_key(who.tenant, ids, case["chunk"]),
    })
print(json.dumps(made))
"""


def golden() -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(GOLDEN.read_text(encoding="utf-8"))
    return plain


@pytest.mark.fault("keys", "in this process")
def test_keys_are_those_of_the_golden_file() -> None:
    for case in golden()["cases"]:
        who = PrefixIdentity(**case["identity"])
        ids, expected = case["tokens"], case["keys"]
        assert who.root.hex() == expected["root"]
        assert [full_key(link) for link in chain(who, ids, case["chunk"])] == expected["full"]
        steering = {"seed": case["seed"], "protected": case["protected"]}
        assert compressed_key(who, ids, case["compressor"], case["options"], **steering) == expected["compressed"]
        assert index_key(who.tenant, ids, case["chunk"]) == expected["index"]


@pytest.mark.fault("keys", "other processes and hash seeds")
@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_keys_do_not_depend_on_the_process_or_the_hash_seed(seed: str) -> None:
    assert _keys_of(sys.executable, seed) == [case["keys"] for case in golden()["cases"]]


@pytest.mark.fault("keys", "Python 3.10 to 3.14, those installed")
@pytest.mark.parametrize("minor", [10, 11, 12, 13, 14])
def test_keys_do_not_depend_on_the_python_version(minor: int) -> None:
    managed = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
    python = str(managed[-1]) if managed else shutil.which(f"python3.{minor}")
    if python is None or subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
        pytest.skip(f"no python3.{minor} here")
    assert _keys_of(python, "7") == [case["keys"] for case in golden()["cases"]]


def _keys_of(python: str, seed: str) -> Any:
    """The same keys by another interpreter, from the one file alone: it needs nothing but the standard library."""
    done = subprocess.run(
        [python, "-I" if seed == "random" else "-s", "-c", PRINT, str(SOURCE), str(GOLDEN)],
        env={"PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_parts_cannot_be_moved_across_their_borders() -> None:
    assert (
        len({digest("t", "ab", "c"), digest("t", "a", "bc"), digest("t", "abc"), digest("t", b"ab", "c"), digest("ta", "b")})
        == 5
    )


@pytest.mark.fault("identity", "each field in the key")
@pytest.mark.parametrize("field", [field.name for field in fields(PrefixIdentity)])
def test_each_field_changes_every_key(field: str) -> None:
    ids = tokens(600)
    other = changed(field)
    before, after = (chain(who, ids, 128) for who in (IDENTITY, other))
    assert not {full_key(link) for link in before} & {full_key(link) for link in after}
    assert compressed_key(IDENTITY, ids, "snapkv", {}) != compressed_key(other, ids, "snapkv", {})
    shown = {name for name, value in IDENTITY.public().items() if other.public()[name] != value}
    assert shown == ({field} - {"tenant"})


def test_the_tenant_is_not_written_into_blobs() -> None:
    assert "tenant" not in IDENTITY.public()


def test_a_chain_link_stands_for_all_tokens_before() -> None:
    ids = tokens(512)
    other = [*ids[:3], ids[3] + 1, *ids[4:]]
    assert len(chain(IDENTITY, ids, 128)) == 4
    assert len(chain(IDENTITY, ids[:511], 128)) == 3
    assert chain(IDENTITY, ids[:127], 128) == []
    assert not set(chain(IDENTITY, ids, 128)) & set(chain(IDENTITY, other, 128))
    for known in range(6):
        assert chain(IDENTITY, ids, 128, chain(IDENTITY, [*ids, *ids], 128)[:known]) == chain(IDENTITY, ids, 128)
    assert chain(IDENTITY, ids[:256], 128) == chain(IDENTITY, ids, 128)[:2]
    assert not set(chain(IDENTITY, ids, 128)) & set(chain(IDENTITY, ids, 256))


def test_what_steers_a_compressor_is_part_of_its_key() -> None:
    ids = tokens(200)
    keys = [
        compressed_key(IDENTITY, ids, "snapkv", {"keep": 0.25}),
        compressed_key(IDENTITY, ids, "kvzip", {"keep": 0.25}),
        compressed_key(IDENTITY, ids, "snapkv", {"keep": 0.5}),
        compressed_key(IDENTITY, ids, "snapkv", {"keep": 0.25}, seed=1),
        compressed_key(IDENTITY, ids, "snapkv", {"keep": 0.25}, protected=[(0, 3)]),
        compressed_key(IDENTITY, ids[:199], "snapkv", {"keep": 0.25}),
    ]
    assert len(set(keys)) == len(keys)
    assert all(key.startswith("compressed-") for key in keys)
    assert compressed_key(IDENTITY, ids, "x", {"a": 1, "b": 2}) == compressed_key(IDENTITY, ids, "x", {"b": 2, "a": 1})


@pytest.mark.parametrize("bad", [-1, 2**32, "3"])
def test_what_is_no_token_id_has_no_key(bad: Any) -> None:
    with pytest.raises(ValueError, match="token id"):
        chain(IDENTITY, [bad, *tokens(127)], 128)


def test_canonical_json_has_one_spelling() -> None:
    assert canonical({"b": [1, 0.1], "a": "é"}) == '{"a":"\\u00e9","b":[1,0.1]}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(float("nan"))

"""Compressed KV out of a prefix store: nothing is compressed again, and tokens and drafts are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.engine.test_prefix_store import CHUNK, Recorded, saved, url
from tests.models import engine, engine_over, model, prompt
from tests.watch import assert_same, watching
from vericache_core.context import Needs
from vericache_core.engine import Engine
from vericache_core.kv import CompressedKV
from vericache_core.outputs import RequestOutput
from vericache_core.plugins.options import Budget
from vericache_core.plugins.spec import CompressorSpec
from vericache_core.runtime.sampling_params import SamplingParams

LONG = SamplingParams(max_new_tokens=16)
CASES: dict[str, dict[str, Any]] = {
    "identity": {"compressor": "identity"},
    "random": {"compressor": "random", "keep": 0.4},
    "adversarial": {"compressor": "adversarial"},
    "random+adversarial": {"compressor": "random+adversarial", "options": {"random.keep": 0.5}},
}


@contextmanager
def counted(ours: Engine) -> Iterator[list[str]]:
    """Names of the compressors whose ``compress`` runs."""
    made: list[str] = []
    make = ours.compressors.make

    def watched(name: str, options: Any) -> Any:
        found = make(name, options)
        compress = found.compress

        def noted(*arguments: Any) -> CompressedKV:
            made.append(name)
            return compress(*arguments)

        patch.object(found, "compress", noted).start()
        return found

    with patch.object(ours.compressors, "make", watched):
        yield made


def ask(ours: Engine, ids: list[int], params: SamplingParams = LONG, **more: Any) -> tuple[RequestOutput, list[str]]:
    with counted(ours) as made, watching(ours):
        (output,) = ours.generate([ids], params, record_logits=True, **more)
    saved(ours)
    return output, made


@pytest.mark.parametrize(("name", "tier"), [("llama", "host"), ("gemma3", "device")])
@pytest.mark.parametrize("case", CASES)
def test_nothing_is_compressed_again(case: str, name: str, tier: str, tmp_path: Path) -> None:
    ids, settings = prompt(300), {**CASES[case], "full_kv": tier, "fold": 8}
    expected, _ = ask(engine(name, **settings), ids)
    cold = engine(name, prefix_store=url(tmp_path), **settings)
    first, made = ask(cold, ids)
    assert (len(made), first.metrics.compressed_bytes_loaded) == (1, 0)
    cold.close()
    warm = engine(name, prefix_store=url(tmp_path), **settings)  # as another process would
    again, made = ask(warm, ids)
    assert made == []
    assert again.metrics.compressed_bytes_loaded > 0
    assert again.metrics.compressed_kv_bytes == first.metrics.compressed_kv_bytes
    assert again.metrics.prefilled == len(ids) - again.metrics.prefix_tokens_loaded <= 300 - CHUNK
    for output in (first, again):
        assert_same(output, expected)
        assert output.metrics.degraded == []
        assert output.metrics.drafted_per_round == expected.metrics.drafted_per_round
        assert output.metrics.accepted_per_round == expected.metrics.accepted_per_round
    assert warm.reuse is not None
    counts = warm.reuse.counts[""]
    assert (counts.compressed_loaded, counts.compressed_saved, counts.faults) == (1, 0, 0)
    warm.close()


@pytest.mark.parametrize("needs", [Needs(queries=40), Needs(attention_mass=True), Needs(scoring=True)])
def test_what_a_compressor_had_to_see_need_not_be_computed_again(needs: Needs, tmp_path: Path) -> None:
    own: list[bytes] = []
    described = CompressorSpec(
        name="recorded",
        factory=type("Specific", (Recorded,), {"made": own, "wants": needs}),
        options=Budget,
        kind="token-drop",
        api_version=1,
        summary="for this test",
    )
    outputs = []
    for store in (None, url(tmp_path), url(tmp_path)):
        ours = engine_over(model("llama"), specs=[described], compressor="recorded", keep=0.4, prefix_store=store)
        outputs.append(ask(ours, prompt(256))[0])
        ours.close()
    assert len(own) == 2
    for output in outputs[1:]:
        assert_same(output, outputs[0])
        assert output.metrics.drafted_per_round == outputs[0].metrics.drafted_per_round
    assert (outputs[2].metrics.prefix_tokens_loaded, outputs[2].metrics.prefilled) == (255, 1)


def test_other_steering_has_other_compressed_kv(tmp_path: Path) -> None:
    ids, store = prompt(300), url(tmp_path)
    kept: dict[str, Any] = {"compressor": "random", "keep": 0.4, "prefix_store": store}
    ask(engine(**kept), ids)
    others: dict[str, tuple[dict[str, Any], SamplingParams, list[int]]] = {
        "options": ({**kept, "keep": 0.5}, LONG, ids),
        "compressor": ({**kept, "compressor": "identity", "keep": None}, LONG, ids),
        "tenant": ({**kept, "tenant": "somebody else"}, LONG, ids),
        "seed": (kept, SamplingParams(max_new_tokens=16, seed=5), ids),
        "prompt": (kept, LONG, [*ids, 7]),
        "switched off": ({**kept, "prefix_store": url(tmp_path, "&compressed=no")}, LONG, ids),
    }
    for name, (settings, params, asked) in others.items():
        ours = engine(**settings)
        output, made = ask(ours, asked, params)
        assert (len(made), output.metrics.compressed_bytes_loaded) == (1, 0), name
        output, made = ask(ours, asked, params)
        assert (made == []) == (name != "switched off"), name
        ours.close()


@pytest.mark.fault("flip", "compressed KV damaged or gone, under an engine")
@pytest.mark.parametrize("how", ["bit", "cut", "full KV in its place", "gone"])
def test_damaged_compressed_kv_costs_its_compression_and_heals(how: str, tmp_path: Path) -> None:
    ids = prompt(300)
    settings: dict[str, Any] = {"compressor": "random", "keep": 0.4, "full_kv": "host"}
    expected, _ = ask(engine(**settings), ids)
    ours = engine(prefix_store=url(tmp_path), **settings)
    ask(ours, ids)
    (file,) = [file for file in (tmp_path / "blobs").iterdir() if file.name.startswith("compressed-")]
    data = bytearray(file.read_bytes())
    file.unlink()
    if how == "bit":
        data[random.Random(2).randrange(len(data) // 2, len(data) - 16)] ^= 4
        file.write_bytes(data)
    elif how == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif how == "full KV in its place":
        full = next(file for file in (tmp_path / "blobs").iterdir() if file.name.startswith("full-"))
        file.write_bytes(full.read_bytes())
    output, made = ask(ours, ids)
    assert_same(output, expected)
    assert (made, len(output.metrics.degraded)) == (["random"], 0 if how == "gone" else 1)
    output, made = ask(ours, ids)
    assert_same(output, expected)
    assert (made, output.metrics.degraded) == ([], [])
    ours.close()


def test_compressed_kv_without_its_full_kv_is_of_use(tmp_path: Path) -> None:
    """Full KV was evicted: all rows are computed, and still nothing is compressed."""
    ids = prompt(300)
    settings: dict[str, Any] = {"compressor": "random", "keep": 0.4, "full_kv": "host"}
    expected, _ = ask(engine(**settings), ids)
    ours = engine(prefix_store=url(tmp_path), **settings)
    ask(ours, ids)
    for file in (tmp_path / "blobs").iterdir():
        if file.name.startswith("full-"):
            file.unlink()
    output, made = ask(ours, ids)
    assert_same(output, expected)
    assert (made, output.metrics.prefix_tokens_loaded) == ([], 0)
    assert output.metrics.compressed_bytes_loaded > 0
    ours.close()


def test_short_prompts_do_not_touch_the_store(tmp_path: Path) -> None:
    ours = engine(compressor="random", keep=0.4, prefix_store=url(tmp_path))
    output, _ = ask(ours, prompt(CHUNK - 30))
    assert output.metrics.degraded == []
    assert not (tmp_path / "blobs").exists()
    ours.close()

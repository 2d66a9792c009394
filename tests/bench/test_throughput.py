from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models import full_forward_decode, model, prompt
from vericache_core.bench.throughput.contest import contest
from vericache_core.bench.throughput.engines import EngineSystem, Shop
from vericache_core.bench.throughput.held import HeldEngine
from vericache_core.bench.throughput.huggingface import HuggingFaceSystem, Variant
from vericache_core.bench.throughput.measured import Measured, System, Unavailable
from vericache_core.bench.throughput.peer import PeerSystem
from vericache_core.bench.throughput.rows import PLAIN, Record, broken, first_difference, row
from vericache_core.bench.throughput.table import HEADER, cells
from vericache_core.bench.throughput.workloads import Prompt, Workload
from vericache_core.cache.pages import PAGE, Extent
from vericache_core.cache.ring import RingPeak
from vericache_core.config import EngineConfig
from vericache_core.model import interface
from vericache_core.plugins.registry import Registry

NEW = 14
LENGTHS = (40, 150, 90)


def workload(**changes: Any) -> Workload:
    prompts = tuple(Prompt(tuple(prompt(length, seed=at)), "hard") for at, length in enumerate(LENGTHS))
    return Workload(**{"name": "tiny", "prompts": prompts, "new_tokens": NEW, "context": max(LENGTHS), **changes})


@pytest.fixture
def shop() -> Iterator[Shop]:
    config = EngineConfig(rows=16, window=4, probe=False, full_kv="device")
    made = Shop(model("llama"), None, config, Registry(discover=False), lambda _: None)
    yield made
    made.close()


def random_keep(keep: float) -> dict[str, Any]:
    return {"compressor": "random", "options": {"keep": keep}}


def rows_of(systems: list[System], what: Workload, repeats: int = 1) -> tuple[dict[str, dict[str, Any]], dict[str, Record]]:
    records: dict[str, Record] = {}
    for record, _, _ in contest(systems, [what], repeats, 0, lambda _: None):
        records[record.system] = record
    for system in systems:
        system.close()
    return {name: row(record, records.get(PLAIN)) for name, record in records.items()}, records


def oracle() -> list[list[int]]:
    return [full_forward_decode(model("llama"), prompt(length, seed=at), NEW)[0] for at, length in enumerate(LENGTHS)]


class Scripted:
    """A system that says what it is told to say."""

    lossless = True

    def __init__(self, name: str, tokens: list[list[int]], log: list[str] | None = None) -> None:
        self.name, self.tokens, self.log = name, tokens, [] if log is None else log

    def prepare(self, workload: Workload) -> None:
        if self.name == "absent":
            raise Unavailable("not here")

    def run(self, workload: Workload) -> Measured:
        self.log.append(self.name)
        if self.name == "failing":
            raise RuntimeError("it\nbroke")
        return Measured(self.tokens, sum(map(len, self.tokens)), 2.0 if self.name == PLAIN else 1.0)

    def release(self) -> None:
        self.log.append(f"release {self.name}")

    def close(self) -> None:
        pass


def test_our_engine_gives_the_tokens_of_the_oracle_with_every_compressor(shop: Shop) -> None:
    systems: list[System] = [
        EngineSystem(shop, PLAIN, {"compressor": None}),
        EngineSystem(shop, "random", random_keep(0.5)),
        EngineSystem(shop, "host", {**random_keep(0.5), "full_kv": "host"}),
        EngineSystem(shop, "adversarial", {"compressor": "adversarial"}),
    ]
    rows, records = rows_of(systems, workload(), repeats=2)
    assert [one["error"] for one in rows.values()] == [None] * 4
    assert records[PLAIN].runs[0].tokens == oracle()
    assert all(one["identical"] for one in rows.values())
    assert all(one["first_difference"] is None for one in rows.values())
    assert all(one["runs"] == 2 for one in rows.values())
    # The first token of each request is the prefill's.
    assert all(one["decoded_tokens"] == len(LENGTHS) * (NEW - 1) for one in rows.values())
    assert rows[PLAIN]["steps"] == NEW - 1
    assert rows[PLAIN]["speedup_vs_plain"] == 1
    assert rows[PLAIN]["drafted"] == 0
    assert rows[PLAIN]["acceptance"] is None
    assert rows["random"]["drafted"] > 0
    assert rows[PLAIN]["swap_hidden_fraction"] is None
    assert 0 <= rows["host"]["swap_hidden_fraction"] <= 1
    assert rows["host"]["swap_bytes"] > 0 == rows["random"]["swap_bytes"]
    assert not broken(list(rows.values()))


def test_drafts_without_verify_are_what_the_compressed_cache_alone_writes(shop: Shop) -> None:
    systems: list[System] = [
        EngineSystem(shop, PLAIN, {"compressor": None}),
        EngineSystem(shop, "all", {"compressor": "identity"}, lossy=True),
        EngineSystem(shop, "some", random_keep(0.3), lossy=True),
    ]
    rows, records = rows_of(systems, workload())
    assert records["all"].runs[0].tokens == oracle()
    assert rows["all"]["decoded_tokens"] == len(LENGTHS) * (NEW - 1)
    assert rows["some"]["identical"] is False
    assert rows["some"]["first_difference"] >= 1  # the first one is the full KV's
    assert not broken(list(rows.values()))  # it promised nothing
    phases = records["some"].runs[0].trace
    assert phases is not None
    assert {phase for *_, phase in phases.phases} == {"draft"}


@pytest.mark.parametrize("variant", ["default", "lookup"])
def test_transformers_decodes_from_its_own_prefill(shop: Shop, variant: Variant) -> None:
    systems: list[System] = [EngineSystem(shop, PLAIN, {"compressor": None}), HuggingFaceSystem(shop, "hf", variant)]
    hooks = dict(model("llama")._forward_pre_hooks)
    rows, records = rows_of(systems, workload(), repeats=2)
    assert rows["hf"]["error"] is None
    assert records["hf"].runs[1].tokens == oracle()  # padding, the cache and its copies change nothing
    assert rows["hf"]["decoded_tokens"] == len(LENGTHS) * NEW
    held = max(LENGTHS) if variant == "lookup" else 3 * max(LENGTHS)
    assert held * shop.token_bytes() <= rows["hf"]["peak_device_kv_bytes"] < 1.2 * held * shop.token_bytes()
    assert model("llama").config._attn_implementation == interface.NAME
    assert model("llama")._forward_pre_hooks == hooks


def test_what_transformers_cannot_do_is_said(shop: Shop) -> None:
    with pytest.raises(Unavailable, match="accelerator"):
        HuggingFaceSystem(shop, "hf", "offloaded").prepare(workload())
    with pytest.raises(Unavailable, match="cap"):
        HuggingFaceSystem(shop, "hf", "default").prepare(workload(budget_share=0.5))


def test_a_setting_that_the_engine_does_not_know_skips_the_system(shop: Shop) -> None:
    systems: list[System] = [
        EngineSystem(shop, PLAIN, {"compressor": None}),
        EngineSystem(shop, "new", {"compressor": "identity", "no_such_field": "ngram"}),
    ]
    rows, _ = rows_of(systems, workload())
    assert rows["new"]["skipped"] is True
    assert "no_such_field" in rows["new"]["error"]
    assert rows["new"]["tokens_per_s"] == {"median": None, "min": None, "max": None}
    assert not broken(list(rows.values()))


def test_the_engine_is_told_the_cap(shop: Shop) -> None:
    system = EngineSystem(shop, PLAIN, {"compressor": None})
    for what in (workload(budget_share=0.5), workload()):
        system.prepare(what)
        assert system._engine is not None
        assert system._engine.config.device_budget == shop.budget(what)
    assert shop.budget(workload()) is None
    assert shop.budget(workload(budget_share=0.5)) == (sum(LENGTHS) + 3 * NEW) * shop.token_bytes() // 2
    system.close()


def test_auto_tells_which_modes_it_chose(shop: Shop) -> None:
    auto = EngineSystem(shop, "auto", {**random_keep(0.5), "window": "auto", "mode": "auto"})
    rows, _ = rows_of([EngineSystem(shop, PLAIN, {"compressor": None}), auto], workload())
    assert rows["auto"]["error"] is None
    assert rows["auto"]["identical"] is True
    assert [note for note in rows["auto"]["notes"] if note.startswith("modes: ")]
    assert not [note for note in rows[PLAIN]["notes"] if note.startswith("modes: ")]


def test_other_tokens_than_plain_are_reported() -> None:
    systems: list[System] = [Scripted(PLAIN, [[1, 2, 3], [4, 5, 6]]), Scripted("wrong", [[1, 2, 3], [4, 0, 6]])]
    rows, _ = rows_of(systems, workload())
    assert rows["wrong"]["identical"] is False
    assert rows["wrong"]["first_difference"] == 1
    assert rows["wrong"]["speedup_vs_plain"] == 2
    assert broken(list(rows.values()))
    assert rows[PLAIN]["identical"] is True


def test_first_difference_sees_missing_tokens() -> None:
    assert first_difference([[1, 2]], [[1, 2, 3]]) == 2
    assert first_difference([[1, 2, 3], [9]], [[1, 2, 3], [8]]) == 0
    assert first_difference([[1, 2]], [[1, 2]]) is None


def test_runs_take_turns_and_a_failure_costs_one_row() -> None:
    log: list[str] = []
    names = [PLAIN, "a", "b", "c", "failing", "absent"]
    rows, records = rows_of([Scripted(name, [[1]], log) for name in names], workload(), repeats=6)
    runs = [name for name in log if not name.startswith("release")]
    assert runs.count("failing") == 1
    assert "absent" not in runs
    assert rows["failing"]["error"] == "RuntimeError: it broke"
    assert (rows["absent"]["error"], rows["absent"]["skipped"]) == ("not here", True)
    assert broken(list(rows.values()))
    turns = [tuple(name for name in runs if name != "failing")[at : at + 4] for at in range(0, 24, 4)]
    assert all(turn[0] == PLAIN and sorted(turn[1:]) == ["a", "b", "c"] for turn in turns)
    assert len(set(turns)) > 1
    assert [name for name in log if name.startswith("release")] == [f"release {name}" for name in names]
    again: list[str] = []
    rows_of([Scripted(name, [[1]], again) for name in names], workload(), repeats=6)
    assert again == log
    assert all(len(records[name].runs) == 6 for name in (PLAIN, "a"))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_cap_on_device_bytes_is_kept_and_swaps_are_held_back(shop: Shop, tier: str) -> None:
    what = workload(
        prompts=tuple(Prompt(tuple(prompt(384, seed=at)), "hard") for at in range(4)),
        tier=tier,
        budget_share=0.5,
        slowdown=1000,
    )
    shop._bandwidth = 2e9  # 2 MB/s for the link
    systems: list[System] = [EngineSystem(shop, PLAIN, {"compressor": None}), EngineSystem(shop, "ours", random_keep(0.1))]
    rows, records = rows_of(systems, what)
    assert rows["ours"]["error"] is None
    assert rows["ours"]["identical"] is True
    assert rows[PLAIN]["within_budget"] is True
    assert rows[PLAIN]["peak_device_kv_bytes"] <= rows[PLAIN]["device_budget_bytes"]
    assert rows["ours"]["within_budget"] is True
    assert rows[PLAIN]["steps"] > NEW - 1  # not all at once
    assert any("at a time" in text for text in rows[PLAIN]["notes"])
    assert systems[1]._built["link_bytes_per_s"] == 2e6  # type: ignore[attr-defined]
    assert rows["ours"]["swap_seconds"] >= 0.9 * rows["ours"]["swap_bytes"] / 2e6
    trace = records["ours"].runs[0].trace
    assert trace is not None
    assert {phase for *_, phase in trace.phases} >= {"draft", "verify"}
    assert len({number for *_, number in trace.swaps}) == 4
    assert {number for _, number, _, _ in trace.windows} == {0, 1, 2, 3}
    assert all(0 <= accepted <= drafted for _, _, drafted, accepted in trace.windows)
    assert max(sample[2 if tier == "host" else 3] for sample in trace.memory) > 0
    assert max(sample[1] for sample in trace.memory) <= rows["ours"]["peak_device_kv_bytes"]
    assert max(end for _, end, _, _ in trace.phases) <= records["ours"].runs[0].decode_seconds + 1e-6


def test_transient_bytes_are_those_of_the_slots_counted_by_hand(shop: Shop) -> None:
    prompts = (Prompt(tuple(prompt(3 * PAGE, seed=1)), "hard"),)
    host = EngineSystem(shop, "host", {**random_keep(0.5), "full_kv": "host"})
    rows, _ = rows_of(
        [EngineSystem(shop, PLAIN, {"compressor": None}), EngineSystem(shop, "device", random_keep(0.5)), host],
        workload(prompts=prompts),
        repeats=2,
    )
    (layer,) = {layer.token_bytes for layer in shop.plain_engine().adapter.layers}
    # Two slots of one layer: 384 rows of the prefill take 3 pages, and there is one more to grow into; decoding uses it.
    assert rows["host"]["peak_transient_bytes"] == 2 * 4 * PAGE * layer
    assert 2 * 4 * PAGE / (3 * PAGE + NEW) <= rows["host"]["transient_layers_per_request"] < 2 * 4 * PAGE / (3 * PAGE)
    assert rows["host"]["transient_layers_per_request"] <= 4
    for name in (PLAIN, "device"):
        assert (rows[name]["peak_transient_bytes"], rows[name]["transient_layers_per_request"]) == (0, None)
    assert rows["host"]["peak_transient_bytes"] < rows["host"]["peak_device_kv_bytes"]
    assert cells(rows["host"])[HEADER.index("TRANSIENT")].endswith("(2.6 layers)")
    assert cells(rows[PLAIN])[HEADER.index("TRANSIENT")] == "-"


def test_transient_bytes_and_layers_are_of_one_run() -> None:
    moments: list[tuple[int | None, float | None]] = [(100, 4.0), (300, 2.5), (300, 2.0), (None, None)]
    runs = {
        at: Measured([[1]], 1, 1.0, peak_transient_bytes=nbytes, transient_layers_per_request=layers)
        for at, (nbytes, layers) in enumerate(moments)
    }
    found = row(Record("ours", "tiny", lossless=True, runs=runs), None)
    assert (found["peak_transient_bytes"], found["transient_layers_per_request"]) == (300, 2.5)
    nothing = row(Record("ours", "tiny", lossless=True, runs={0: runs[3]}), None)
    assert (nothing["peak_transient_bytes"], nothing["transient_layers_per_request"]) == (None, None)


def test_slots_of_a_prefill_are_left_to_decoding_and_its_peaks_are_not(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    real = HeldEngine.begin
    prefilling, made = [False], list[bool]()

    def begin(self: HeldEngine, request: Any, source: Any) -> None:
        prefilling[0] = True
        real(self, request, source)
        prefilling[0] = False
        self.loop.peak_device_kv_bytes, self.loop.ring.peak = 10**12, RingPeak(10**12, 1)

    def counted(*arguments: Any) -> Extent:
        made.append(prefilling[0])
        return Extent.allocate(*arguments)

    monkeypatch.setattr(HeldEngine, "begin", begin)
    monkeypatch.setattr("vericache_core.cache.ring.Extent", SimpleNamespace(allocate=counted))
    one = workload(prompts=(Prompt(tuple(prompt(3 * PAGE, seed=1)), "hard"),))
    host = EngineSystem(shop, "host", {**random_keep(0.5), "full_kv": "host"})
    rows, _ = rows_of([EngineSystem(shop, PLAIN, {"compressor": None}), host], one)
    assert rows["host"]["identical"] is True
    assert rows["host"]["swap_bytes"] > 0
    assert 0 < rows["host"]["peak_transient_bytes"] < rows["host"]["peak_device_kv_bytes"] < 10**12
    assert any(made)
    assert all(made)


def test_nobody_gains_a_token_while_the_clock_stands(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    what = workload(prompts=tuple(Prompt(tuple(prompt(384, seed=at)), "hard") for at in range(4)))
    real, seen, gained = HeldEngine.begin, list[Any](), list[int]()

    def watched(self: HeldEngine, request: Any, source: Any) -> None:
        before = [len(other.generated) for other in seen]
        real(self, request, source)
        gained.extend(len(other.generated) - count for other, count in zip(seen, before, strict=True))
        seen.append(request)

    monkeypatch.setattr(HeldEngine, "begin", watched)
    rows, _ = rows_of([EngineSystem(shop, PLAIN, {"compressor": None})], what)
    assert rows[PLAIN]["error"] is None
    assert gained
    assert not any(gained)


def test_prompts_are_prefilled_once_and_given_back(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = type(shop.plain_engine()).prefill

    def counted(self: Any, one: Prompt) -> Any:
        made.append(real(self, one))
        return made[-1]

    monkeypatch.setattr(type(shop.plain_engine()), "prefill", counted)
    systems: list[System] = [EngineSystem(shop, PLAIN, {"compressor": None}), EngineSystem(shop, "random", random_keep(0.5))]
    list(contest(systems, [workload(), workload(name="again")], 2, 0, lambda _: None))
    assert len(made) == len(LENGTHS)
    shop.close()
    assert all(full.device_bytes == 0 for full in made)


def peer(timeout: float = 60) -> PeerSystem:
    return PeerSystem("fake", sys.executable, "peer_fake", {"model": "m"}, timeout, 100, Path(__file__).parent)


def test_a_peer_answers_over_its_standard_streams() -> None:
    other = peer()
    rows, _ = rows_of([Scripted(PLAIN, [[40] * NEW, [150] * NEW, [90] * NEW]), other], workload(), repeats=2)
    assert rows["fake"]["error"] is None
    assert rows["fake"]["identical"] is True
    assert rows["fake"]["tokens_per_s"]["median"] == NEW * 3 / 0.5
    assert rows["fake"]["prefill_seconds"] == 1.5
    assert rows["fake"]["step_seconds"]["median"] == 0.5 / NEW
    longest = 150 + NEW
    assert rows["fake"]["notes"] == ["fake", f"model m, max_len {longest}, requests 3, kv_bytes {3 * longest * 100}"]


def test_a_peer_gets_no_more_of_a_busy_machine_than_we_do() -> None:
    other = peer()
    try:
        other.prepare(workload())
        assert other._child is not None
        process = other._child._process.pid
        assert os.getsid(process) == os.getsid(0)
        assert os.getpgid(process) == process  # it ends with its children
    finally:
        other.close()


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("no-load", "does not start: ValueError: no such model"),
        ("raise", "RuntimeError: out of luck"),
        ("crash", "ended with status 3: fatal: it broke"),
        ("silent", "no answer in 3 s"),
        ("short", "answered 2 outputs"),
    ],
)
def test_what_goes_wrong_in_a_peer_is_a_row(mode: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PEER", mode)
    other = peer(timeout=3)
    systems: list[System] = [Scripted(PLAIN, [[1]]), other]
    records = {record.system: record for record, _, _ in contest(systems, [workload()], 1, 0, lambda _: None)}
    assert words in str(records["fake"].problem)
    assert records[PLAIN].problem is None
    assert other._child is None  # nothing runs on


def test_a_peer_that_is_no_program_is_a_row() -> None:
    rows, _ = rows_of([Scripted(PLAIN, [[1]]), PeerSystem("gone", "/no/python", "peer_fake", {}, 5, 1)], workload())
    assert "No such file" in rows["gone"]["error"]


def test_the_same_bits_with_bf16(shop: Shop) -> None:
    low = Shop(model("llama", torch.bfloat16), None, shop.config, shop.registry, lambda _: None)
    systems: list[System] = [EngineSystem(low, PLAIN, {"compressor": None}), EngineSystem(low, "random", random_keep(0.5))]
    rows, _ = rows_of(systems, workload())
    low.close()
    assert rows["random"]["identical"] is True

"""Metrics: exact names, conventions, and counters that agree with those of the requests."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from tests.models import build
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.cache.tiers import HostStore
from vericache_core.errors import ConfigError, MissingDependencyError
from vericache_core.runtime.background import BackgroundVerify
from vericache_core.runtime.choose import Choice
from vericache_core.runtime.observer import LoopObserver
from vericache_core.runtime.request import Request
from vericache_core.service.audit import IdentityAudit
from vericache_core.service.metrics import Metrics
from vericache_core.service.watch import EngineWatch

PROMPTS = [list(range(1, 150)), list(range(3, 80)), [5, 6, 7, 8] * 12]
PARAMS = SamplingParams(max_new_tokens=24)
NAMES = {
    "vericache_draft_tokens_total",
    "vericache_accepted_tokens_total",
    "vericache_drafts_total",
    "vericache_accepted_tokens_per_position_total",
    "vericache_kv_bytes",
    "vericache_swap_bytes_total",
    "vericache_prompt_tokens_total",
    "vericache_swap_seconds",
    "vericache_compress_seconds",
    "vericache_verify_seconds",
    "vericache_identity_mismatch_total",
    "vericache_near_tie_total",
    "vericache_time_to_first_token_seconds",
    "vericache_inter_token_latency_seconds",
    "vericache_build_info",
}


def engine(**changes: Any) -> Engine:
    own = {"rows": 16, "compressor": "random", "window": 4, "full_kv": "host", **changes}
    return Engine(build("llama"), config=EngineConfig(**own))


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, f"{name}{labels}"
    return found


def served(metrics: Metrics) -> set[str]:
    """Names of all metrics in the text that a scraper gets, as they are declared there."""
    text = metrics.render()[0].decode()
    list(text_string_to_metric_families(text))  # a scraper can read it
    return {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE") and "_created" not in line}


def test_every_name_is_the_agreed_one() -> None:
    assert served(Metrics()) == NAMES


def test_every_counter_of_a_run_equals_that_of_its_requests() -> None:
    metrics = Metrics()
    with engine() as ours:
        EngineWatch.attach(ours, metrics)
        outputs = ours.generate(PROMPTS, PARAMS, compressor=["random", "random", None])
        assert metrics.registry.get_sample_value("vericache_kv_bytes", {"cache": "full", "tier": "device"}) == 0
    drafting = [output.metrics for output in outputs if output.metrics.compressor]
    assert sum(m.rounds for m in drafting) > 5
    by = {"compressor": "random"}
    assert value(metrics, "vericache_drafts_total", **by) == sum(m.rounds for m in drafting)
    assert value(metrics, "vericache_draft_tokens_total", **by) == sum(m.drafted for m in drafting)
    assert value(metrics, "vericache_accepted_tokens_total", **by) == sum(m.accepted for m in drafting)
    accepted = [round_ for m in drafting for round_ in m.accepted_per_round]
    for position in range(max(accepted)):
        found = value(metrics, "vericache_accepted_tokens_per_position_total", position=str(position), **by)
        assert found == sum(count > position for count in accepted)
    swapped = sum(m.swap_bytes for m in drafting)
    assert swapped > 0
    assert value(metrics, "vericache_swap_bytes_total", direction="in") == swapped
    offloaded = sum(output.metrics.offload_bytes for output in outputs)
    assert value(metrics, "vericache_swap_bytes_total", direction="out") == offloaded > 0
    assert value(metrics, "vericache_prompt_tokens_total", source="computed") == sum(o.metrics.prefilled for o in outputs)
    assert value(metrics, "vericache_swap_seconds_sum") == pytest.approx(sum(m.swap_seconds for m in drafting))
    assert value(metrics, "vericache_compress_seconds_count", **by) == 2
    for phase in ("verify", "compress"):
        found = value(metrics, f"vericache_{phase}_seconds_sum", **by)
        assert found == pytest.approx(sum(m.seconds[phase] for m in drafting))
    for name, count in (("random", 2), ("none", 1)):
        assert value(metrics, "vericache_time_to_first_token_seconds_count", compressor=name) == count
        tokens = sum(len(o.token_ids) for o in outputs if (o.metrics.compressor or "none") == name)
        assert value(metrics, "vericache_inter_token_latency_seconds_count", compressor=name) == tokens - count


def test_kv_bytes_are_those_of_the_live_requests_and_zero_after_a_cancel() -> None:
    metrics = Metrics()
    with engine() as ours:
        EngineWatch.attach(ours, metrics)
        job = ours.submit(PROMPTS[0], PARAMS)
        while len(job.token_ids) < 8:
            ours.step()
        (request,) = ours.loop.requests
        assert request.draft is not None
        assert value(metrics, "vericache_kv_bytes", cache="draft", tier="device") == request.draft.device_bytes > 0
        assert value(metrics, "vericache_kv_bytes", cache="full", tier="host") == request.full.tier_bytes > 0
        held = request.full.device_bytes + ours.loop.ring.nbytes
        assert value(metrics, "vericache_kv_bytes", cache="full", tier="device") == held > 0
        job.cancel()
        for cache, tier in (("draft", "device"), ("full", "host"), ("full", "disk"), ("full", "device")):
            assert value(metrics, "vericache_kv_bytes", cache=cache, tier=tier) == 0


def test_a_verify_in_the_background_counts_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    arrive, start, started = HostStore.arrive, BackgroundVerify.start, [0]

    def slow(self: HostStore, *arguments: Any) -> Any:
        time.sleep(0.03)
        return arrive(self, *arguments)

    def counted(self: BackgroundVerify, *arguments: Any) -> None:
        started[0] += 1
        start(self, *arguments)

    monkeypatch.setattr(HostStore, "arrive", slow)
    monkeypatch.setattr(BackgroundVerify, "start", counted)
    metrics = Metrics()
    with engine() as ours:
        EngineWatch.attach(ours, metrics)
        outputs = ours.generate(PROMPTS, PARAMS)
    assert started[0]
    layers = 3
    rounds = sum(output.metrics.rounds for output in outputs)
    assert value(metrics, "vericache_verify_seconds_count", compressor="random") >= rounds
    assert value(metrics, "vericache_verify_seconds_sum", compressor="random") >= started[0] * layers * 0.03


def test_near_ties_are_counted_where_two_tokens_hardly_differ() -> None:
    counts = {}
    for model in ("llama", "near_tie"):
        metrics = Metrics()
        with Engine(build(model), config=EngineConfig(rows=16, compressor="random", window=4)) as ours:
            EngineWatch.attach(ours, metrics)
            (output,) = ours.generate([PROMPTS[1]], PARAMS)
        counts[model] = output.metrics.near_ties
        if counts[model]:
            assert value(metrics, "vericache_near_tie_total", compressor="random") == counts[model]
    assert counts["llama"] < counts["near_tie"] <= PARAMS.max_new_tokens


def test_an_audit_finds_a_wrong_answer_and_no_other() -> None:
    metrics = Metrics()
    assert value(metrics, "vericache_identity_mismatch_total", compressor="none") == 0
    with engine() as ours:
        audit = IdentityAudit(ours, metrics, every=2)
        (output,) = ours.generate([PROMPTS[0]], PARAMS)
        (plain,) = ours.generate([PROMPTS[0]], PARAMS, compressor=None)
        assert audit.consider(plain, PARAMS) is None
        assert audit.consider(output, PARAMS) is None
        assert audit.consider(output, PARAMS) is True
        assert value(metrics, "vericache_identity_mismatch_total", compressor="random") == 0
        wrong = dataclasses.replace(output, token_ids=(*output.token_ids[:-1], output.token_ids[-1] ^ 1))
        cut = dataclasses.replace(output, token_ids=output.token_ids[:5], finish_reason="cancelled")
        assert audit.consider(cut, PARAMS) is None
        assert audit.consider(cut, PARAMS) is True
        assert audit.consider(wrong, PARAMS) is None
        assert audit.consider(wrong, PARAMS) is False
        assert value(metrics, "vericache_identity_mismatch_total", compressor="random") == 1
        with pytest.raises(ConfigError, match="every: expected 1 or more"):
            IdentityAudit(ours, metrics, every=0)


def test_audit_every_is_the_switch_of_an_engine() -> None:
    metrics = Metrics()
    with engine(audit_every=2) as ours:
        EngineWatch.attach(ours, metrics)
        assert ours.audit is not None
        outputs = ours.generate(PROMPTS, PARAMS, compressor=["random", None, "random"])
        assert [output.metrics.identical for output in outputs] == [None, None, True]
        job = ours.submit(PROMPTS[1], PARAMS)
        assert job.result().metrics.identical is None
        last = list(ours.stream(PROMPTS[1], PARAMS))[-1].output
        assert last is not None
        assert last.metrics.identical is True
        assert (ours.audit.audited, ours.audit.mismatches) == (2, 0)
        assert value(metrics, "vericache_identity_mismatch_total", compressor="random") == 0
        commit = Request.commit

        def wrong(self: Request, choice: Choice, logits: Tensor) -> None:
            commit(self, dataclasses.replace(choice, token=choice.token ^ 1) if self.compressor else choice, logits)

        with patch.object(Request, "commit", wrong):
            outputs = ours.generate([PROMPTS[1]] * 2, PARAMS)
        assert [output.metrics.identical for output in outputs] == [None, False]
        assert (ours.audit.audited, ours.audit.mismatches) == (3, 1)
        assert value(metrics, "vericache_identity_mismatch_total", compressor="random") == 1


def test_what_a_prefix_store_did_is_told_by_tenant(tmp_path: Path) -> None:
    metrics = Metrics()
    with engine(prefix_store=f"file://{tmp_path}?chunk=128&timeout=60") as ours:
        EngineWatch.attach(ours, metrics)
        assert ours.reuse is not None
        for _ in range(2):
            ours.generate([PROMPTS[0]], PARAMS)
            assert ours.reuse.saver.flush(60)
    name = "vericache_prefix_store_events_total"
    for event, count in (("chunks_saved", 1), ("chunks_loaded", 1), ("compressed_saved", 1), ("compressed_loaded", 1)):
        assert value(metrics, name, event=event, tenant="none") == count
    assert value(metrics, "vericache_prompt_tokens_total", source="store") == 128
    assert value(metrics, "vericache_prompt_tokens_total", source="computed") == 149 + 21
    moved = {way: value(metrics, "vericache_prefix_store_bytes_total", direction=way, tenant="none") for way in ("in", "out")}
    assert moved["in"] > moved["out"] > 0  # with the headers of the blobs


def test_services_do_not_share_counters() -> None:
    first, second = Metrics(), Metrics()
    first.count_round("kivi", 4, 3)
    assert value(first, "vericache_accepted_tokens_total", compressor="kivi") == 3
    assert second.registry.get_sample_value("vericache_accepted_tokens_total", {"compressor": "kivi"}) is None


def test_without_metrics_the_loop_keeps_the_observer_that_does_nothing() -> None:
    with engine() as ours:
        assert type(ours.loop.observer) is LoopObserver
        assert ours.generate([PROMPTS[1]], PARAMS)[0].finish_reason == "length"


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(MissingDependencyError, match=r"vericache\[metrics\]"):
        Metrics()


def test_a_service_needs_no_torch() -> None:
    code = (
        "import sys, vericache_core.service.http, vericache_core.service.metrics, vericache_core.service.logs, "
        "vericache_core.service.drain, vericache_core.service.watch, vericache_core.service.audit; "
        "vericache_core.service.metrics.Metrics(); print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"

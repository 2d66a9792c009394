"""A compressor may raise, lie, scribble and keep references: it costs speed, never tokens and never the process."""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from typing import Any

import pytest
import torch

from tests.engine.faulty import Faulty, spec
from tests.models import build, engine_over, model, prompt
from tests.watch import assert_same, watching
from vericache_core.engine import Engine
from vericache_core.errors import CompressorFault
from vericache_core.runtime.sampling_params import SamplingParams

PROMPT = prompt(37, seed=8)
PARAMS = SamplingParams(max_new_tokens=24, repetition_penalty=1.2)
RAISING = ("compress", "exit", "none", "observer", "missing layer", "too few layers", "heads", "tokens", "map", "negative",
           "empty head", "attend", "late attend", "parts", "wrong shape", "extend", "extend forgets")  # fmt: skip
SILENT = ("mutate", "nan", "mutate query", "keep", "extend mutates")


def faulty(fault: str, loaded: Any = None, **settings: Any) -> tuple[Engine, dict[str, Any]]:
    state: dict[str, Any] = {}
    factory = functools.partial(Faulty, fault=fault, state=state)
    loaded = model("llama") if loaded is None else loaded
    return engine_over(loaded, specs=[spec("faulty", factory)], compressor=None, fold=6, **settings), state


@pytest.mark.parametrize("attention", ["numba", "reference"])
@pytest.mark.parametrize("tier", ["device", "host"])
@pytest.mark.parametrize("fault", RAISING)
def test_a_fault_drops_its_request_to_plain_decoding(
    fault: str, tier: str, attention: str, caplog: pytest.LogCaptureFixture
) -> None:
    ours, _ = faulty(fault, full_kv=tier, attention=attention)
    (expected,) = ours.generate(PROMPT, PARAMS, compressor=None, record_logits=True)
    with caplog.at_level(logging.WARNING, "vericache"), watching(ours):
        (found,) = ours.generate(PROMPT, PARAMS, compressor="faulty", record_logits=True)
    assert_same(found, expected)
    assert len(found.metrics.degraded) == 1
    assert "faulty" in caplog.text
    assert "decoding plainly" in caplog.text
    if fault in ("compress", "observer", "attend", "extend"):  # raised by a line of the plugin, which is named
        assert "(tests.engine.faulty, line " in found.metrics.degraded[0]
    assert not ours.loop.compression.observed


@pytest.mark.parametrize("fault", SILENT)
@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_compressor_that_scribbles_changes_nothing(fault: str, tier: str) -> None:
    ours, _ = faulty(fault, full_kv=tier)
    (expected,) = ours.generate(PROMPT, PARAMS, compressor=None, record_logits=True)
    with watching(ours):
        (found,) = ours.generate(PROMPT, PARAMS, compressor="faulty", record_logits=True)
    assert_same(found, expected)
    assert not found.metrics.degraded


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_what_a_compressor_still_holds_reaches_nothing(tier: str) -> None:
    """It scribbles over the maps and rows that it returned while the request runs."""
    ours, state = faulty("keep", full_kv=tier)
    (expected,) = ours.generate(PROMPT, PARAMS, compressor=None, record_logits=True)
    step = ours.loop.step

    def scribbling() -> Any:
        for layer in state.get("kept", ()):
            layer.surviving.counts = (1, 1)
            layer.surviving._positions = torch.tensor([5, 6], dtype=torch.int32)
            layer.flat_keys.fill_(float("nan"))
        return step()

    ours.loop.step = scribbling  # type: ignore[method-assign]
    (found,) = ours.generate(PROMPT, PARAMS, compressor="faulty", record_logits=True)
    assert_same(found, expected)
    assert found.metrics.acceptance == 1.0


@pytest.mark.parametrize("fault", RAISING)
def test_with_policy_fail_the_request_fails_and_the_others_go_on(fault: str) -> None:
    ours, _ = faulty(fault, on_compressor_error="fail")
    sane = engine_over(model("llama"))
    stream = ours.stream(PROMPT, PARAMS, compressor="identity")
    head = next(stream).token_ids
    (found,) = ours.generate(PROMPT, PARAMS, compressor="faulty")
    assert found.finish_reason == "error"
    assert isinstance(found.error, CompressorFault)
    rest = tuple(token for chunk in stream for token in chunk.token_ids)
    (expected,) = sane.generate(PROMPT, PARAMS, compressor=None)
    assert head + rest == expected.token_ids
    assert found.token_ids == expected.token_ids[: len(found.token_ids)]
    assert not ours.loop.requests


@pytest.mark.parametrize("fault", ["supports", "needs"])
def test_a_compressor_that_cannot_be_attached_is_an_error_before_anything_runs(fault: str) -> None:
    ours, _ = faulty(fault)
    with pytest.raises(CompressorFault, match=f"{fault} broke"):
        ours.generate(PROMPT, PARAMS, compressor="faulty")
    assert ours.loop.steps == 0


def test_codes_are_attended_to_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine drafts from packed codes without decoding any of them, and commits what it would without drafts."""
    kivi = pytest.importorskip("vericache_compressor_kivi", reason="the kivi compressor is not installed")
    plugin = importlib.import_module("vericache_compressor_kivi.plugin")
    settings = {"compressor": "kivi", "options": {"bits": 4, "group": 8, "residual": 16}, "attention": "numba"}
    ours = engine_over(model("llama"), specs=list(plugin.vericache_compressors()), **settings)
    (expected,) = ours.generate(PROMPT, PARAMS, compressor=None, record_logits=True)
    for codec in (kivi.KeyCodec, kivi.ValueCodec):
        monkeypatch.setattr(codec, "decode", lambda *_: _broke())
    (found,) = ours.generate(PROMPT, PARAMS, record_logits=True)
    assert_same(found, expected)
    assert not found.metrics.degraded
    assert found.metrics.accepted


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", ["raises", "wrong shape"])
def test_a_rotation_that_fails_drops_its_requests_one_by_one(how: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turbo = pytest.importorskip("vericache_compressor_turboquant.compressor", reason="turboquant is not installed")
    plugin = importlib.import_module("vericache_compressor_turboquant.plugin")
    specs = list(plugin.vericache_compressors())
    ours = engine_over(model("llama"), specs=specs, compressor="turboquant", attention="numba")
    expected = ours.generate([PROMPT, PROMPT[5:]], PARAMS, compressor=None, record_logits=True)
    wrong = {"raises": lambda *_: _broke(), "wrong shape": lambda _, rows: rows[..., :1]}
    monkeypatch.setattr(turbo.RotatedSpace, where, wrong[how])
    found = ours.generate([PROMPT, PROMPT[5:]], PARAMS, record_logits=True)
    for ours_, theirs in zip(found, expected, strict=True):
        assert_same(ours_, theirs)
        assert len(ours_.metrics.degraded) == 1


def _broke() -> Any:
    raise RuntimeError("it broke")


def test_after_a_fault_the_model_is_as_before() -> None:
    loaded = build("llama")
    ids = torch.tensor([PROMPT])

    def plainly() -> list[int]:
        out = loaded.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        tokens: list[int] = out[0].tolist()
        return tokens

    before = plainly()
    ours, _ = faulty("late attend", loaded)
    ours.generate(PROMPT, PARAMS, compressor="faulty")
    assert plainly() == before
    hooks = [
        hook for module in loaded.modules() for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    ]
    assert not hooks
    # Layers look for packed weights and for their fused form in the step they run in, and there is no step.
    changed = [vars(module)["forward"] for module in loaded.modules() if "forward" in vars(module)]
    assert {forward.__module__ for forward in changed} <= {"vericache_core.model.packed", "vericache_core.model.fused"}


def test_two_engines_over_one_model_in_two_threads_do_not_mix() -> None:
    loaded = build("gpt2")
    engines = [engine_over(loaded, compressor="random", keep=0.3), faulty("late attend", loaded, rows=8, window=3)[0]]
    names = ["random", "faulty"]
    expected = [
        ours.generate([prompt(20 + n, seed=n) for n in range(3)], PARAMS, compressor=None, record_logits=True)
        for ours in engines
    ]
    found: list[Any] = [None, None]

    def work(number: int) -> None:
        prompts = [prompt(20 + n, seed=n) for n in range(3)]
        found[number] = engines[number].generate(prompts, PARAMS, compressor=names[number], record_logits=True)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b)

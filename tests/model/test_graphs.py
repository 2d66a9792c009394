"""Steps as graphs: the pieces hold nothing that changes, have the bits of the forward, and are left alone where they do not.

There is no GPU here. ``tests/tape.py`` stands in for CUDA graphs, with their limits and with results that do not last.
"""

from __future__ import annotations

import functools
import logging
import re
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.faulty import Faulty, spec
from tests.models import ARCHITECTURES, build, engine_over, model, prompt
from tests.tape import TapeRecorder, place
from tests.watch import assert_same, same_rows, watching
from vericache_core import SamplingParams
from vericache_core.engine import Engine
from vericache_core.errors import ConfigError
from vericache_core.model import graphs
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.graphs import capture_steps, recorder_for

PARAMS = SamplingParams(max_new_tokens=24)
PROMPTS = [prompt(length, seed=length) for length in (37, 5, 150)]


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    """Every adapter records with it."""
    recorder = TapeRecorder()
    monkeypatch.setattr(graphs, "recorder_for", lambda _: recorder)
    return recorder


def engine(loaded: Any, mode: str, specs: Any = (), **settings: Any) -> Engine:
    """As on a GPU: the modules' own arithmetic, nothing packed or fused for the CPU."""
    return engine_over(loaded, specs=specs, graphs=mode, fuse="never", pack_weights="never", **settings)


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("a step ran without its graph")


def plain_adapter(loaded: Any) -> ModelAdapter:
    return ModelAdapter(loaded, 8, "never", "never")


class Sums:
    """Attention that adds up what it is asked, and ends its step in layer ``fails`` if there is one."""

    def __init__(self, fails: int | None = None) -> None:
        self.kept: list[Tensor] = []
        self.fails = fails

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        if module.layer_idx == self.fails:
            raise ConnectionError("the tier is gone")
        self.kept.append(key)
        return query * 0.5 + (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in ARCHITECTURES), ("llama", torch.bfloat16)])
def test_whole_runs_have_the_bits_of_the_forward(name: str, dtype: torch.dtype, tape: TapeRecorder) -> None:
    runs = []
    for mode in ("never", "auto"):
        with (
            engine(model(name, dtype), mode, compressor="random", full_kv="host", scheduler="lockstep") as ours,
            watching(ours) as watch,
        ):
            if mode == "auto":
                assert ours.adapter.graphs is not None, ours.adapter.graphs_refused
                ours.adapter.forward = forbidden  # type: ignore[method-assign]
            plain = ours.generate(PROMPTS, PARAMS, compressor=None, record_logits=True)
            drafted = ours.generate(PROMPTS, PARAMS, record_logits=True)
            runs.append((plain + drafted, watch.in_order()))
    assert sum(output.metrics.drafted for output in runs[1][0]) > 0
    for theirs, mine in zip(*(run[0] for run in runs), strict=True):
        assert_same(mine, theirs)
    assert all(same_rows(mine, theirs) for theirs, mine in zip(*(run[1] for run in runs), strict=True))


def test_all_shapes_of_a_probed_engine_are_captured(tape: TapeRecorder) -> None:
    outputs = []
    for mode in ("never", "auto"):
        with engine(model("llama"), mode, compressor="random", probe=True) as ours:
            outputs.append(ours.generate(PROMPTS, PARAMS, record_logits=True))
            if mode == "auto":
                assert ours.adapter.graphs is not None
                assert ours.adapter.graphs.shapes == ours.adapter.shapes
                assert len(tape.sessions) == len(ours.adapter.shapes) > 1
    for theirs, mine in zip(*outputs, strict=True):
        assert_same(mine, theirs)


def test_requests_come_and_go(tape: TapeRecorder) -> None:
    with engine(model("llama"), "never", compressor="random") as ours:
        expected = ours.generate(PROMPTS, PARAMS, record_logits=True)
    with engine(model("llama"), "auto", compressor="random", full_kv="host") as ours:
        jobs = [ours.submit(PROMPTS[0], PARAMS, record_logits=True)]
        for _ in range(6):
            assert ours.step()
        jobs.append(ours.submit(PROMPTS[1], PARAMS, record_logits=True))
        jobs.append(ours.submit(PROMPTS[2], PARAMS, record_logits=True))
        for _ in range(12):
            assert ours.step()
        jobs[0].cancel()
        while ours.step():
            pass
        assert tape.steps > 30
        assert jobs[0].token_ids == expected[0].token_ids[: len(jobs[0].token_ids)]
        for job, reference in zip(jobs[1:], expected[1:], strict=True):
            assert_same(job.result(), reference)


def test_a_fault_in_the_middle_of_a_step_leaves_no_trace(tape: TapeRecorder) -> None:
    factory = functools.partial(Faulty, fault="late attend", state={})
    with engine(model("llama"), "auto", [spec("faulty", factory)], compressor=None, fold=6) as ours:
        (expected,) = ours.generate(PROMPTS[0], PARAMS, compressor=None, record_logits=True)
        (found,) = ours.generate(PROMPTS[0], PARAMS, compressor="faulty", record_logits=True)
        assert ours.adapter.graphs is not None
    assert len(found.metrics.degraded) == 1
    assert_same(found, expected)


def test_pieces_are_cut_at_attention_and_take_every_input_from_memory_that_is_kept(tape: TapeRecorder) -> None:
    adapter = plain_adapter(build("llama"))
    capture_steps(adapter, "auto")
    assert adapter.graphs is not None
    assert [len(tapes) for tapes in tape.sessions] == [4]  # three layers
    one = adapter.graphs._graphs[8]
    held = [*adapter.graphs._weights, one._ids, one._positions, one._mask, *(piece.answer for piece in one._pieces)]
    assert tape.outside() <= {place(part) for part in held}
    assert {place(part) for part in (one._ids, one._positions)} <= tape.outside()


def test_every_step_has_its_own_tokens_and_positions(tape: TapeRecorder) -> None:
    graphed, plain = plain_adapter(model("llama")), plain_adapter(model("llama"))
    capture_steps(graphed, "auto")
    before = tape.steps
    for ids, positions in (([5, 6, 7], [0, 1, 2]), ([5], [400]), ([5], [3]), (list(range(8)), [9] * 8)):
        found, expected = (each.step(ids, positions, Sums()) for each in (graphed, plain))
        assert torch.equal(found, expected)
    assert tape.steps == before + 4


def test_a_step_that_fails_gives_the_buffers_back(tape: TapeRecorder) -> None:
    adapter, expected = plain_adapter(model("llama")), plain_adapter(model("llama")).step([1], [2], Sums())
    capture_steps(adapter, "auto")
    with pytest.raises(ConnectionError):
        adapter.step([7, 8], [0, 1], Sums(fails=1))
    before = tape.steps
    assert torch.equal(adapter.step([1], [2], Sums()), expected)
    assert tape.steps == before + 1


def test_what_a_step_asks_lasts_until_the_next_one_only_and_logits_last(tape: TapeRecorder) -> None:
    adapter, attention = plain_adapter(model("llama")), Sums()
    capture_steps(adapter, "auto")
    first = adapter.step([1], [2], attention)
    copy, key = first.clone(), attention.kept[0].clone()
    adapter.step([3], [4], Sums())
    assert torch.equal(first, copy)
    assert not torch.equal(attention.kept[0], key)


def test_a_step_without_logits_skips_the_output_head(tape: TapeRecorder) -> None:
    adapter, attention = plain_adapter(model("llama")), Sums()
    capture_steps(adapter, "auto")
    last = tape.sessions[0][-1]
    last.on_replay = lambda: pytest.fail("nobody asked for logits")
    assert adapter.step([1], [2], attention, logits=False).isnan().all()
    assert len(attention.kept) == 3


def test_a_second_step_at_the_same_time_runs_without_the_graph(tape: TapeRecorder) -> None:
    adapter = plain_adapter(model("llama"))
    expected = [adapter.step([n], [n], Sums()) for n in (1, 2)]
    capture_steps(adapter, "auto")
    inner: list[Tensor] = []

    class Nested(Sums):
        def attend(self, module: Any, *rest: Any) -> Tensor:
            if module.layer_idx == 1:
                inner.append(adapter.step([2], [2], Sums()))
            return super().attend(module, *rest)

    before = tape.steps
    outer = adapter.step([1], [1], Nested())
    assert torch.equal(outer, expected[0])
    assert torch.equal(inner[0], expected[1])
    assert tape.steps == before + 1


def _counting(module: nn.Module, rows: Tensor) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1  # type: ignore[assignment]
    scaled: Any = module.calls
    return nn.functional.linear(rows, module.weight) * scaled  # type: ignore[arg-type,no-any-return]


def _waiting(module: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.linear(rows, module.weight) * float(rows.abs().max() > 0)  # type: ignore[arg-type]


def _copying(module: nn.Module, rows: Tensor) -> Tensor:
    return nn.functional.linear(rows, module.weight) * torch.tensor([1.0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (_counting, "other bits in a step of 16 rows"),
        (_waiting, "makes the CPU wait|not permitted"),
        (_copying, "not permitted"),
    ],
)
def test_a_model_that_cannot_be_captured_runs_as_it_is(
    forward: Any, reason: str, tape: TapeRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = build("llama")
    if forward is not _counting:  # which has no answer that could be compared
        with engine(loaded, "never") as ours:
            expected = ours.generate(PROMPTS[:1], PARAMS, record_logits=True)
    adapter = ModelAdapter(loaded, 16, "never", "never")
    loaded.model.layers[1].mlp.up_proj.forward = MethodType(forward, loaded.model.layers[1].mlp.up_proj)
    with caplog.at_level(logging.WARNING, "vericache"):
        capture_steps(adapter, "auto")
    assert adapter.graphs is None
    assert adapter.graphs_refused is not None
    assert re.search(reason, adapter.graphs_refused)
    assert "without CUDA graphs" in caplog.text
    assert not tape.open
    if forward is not _counting:
        before = tape.steps
        with engine(loaded, "auto") as ours:
            assert_same(ours.generate(PROMPTS[:1], PARAMS, record_logits=True)[0], expected[0])
        assert tape.steps == before


def test_off_and_on_the_cpu_nothing_is_captured(tape: TapeRecorder) -> None:
    adapter = plain_adapter(model("llama"))
    capture_steps(adapter, "never")
    assert (adapter.graphs, adapter.graphs_refused, tape.sessions) == (None, None, [])
    assert recorder_for(torch.device("cpu")) is None
    with pytest.raises(ConfigError, match="graphs"):
        engine(model("llama"), "sometimes")

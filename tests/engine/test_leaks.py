"""After sessions that finish, are cancelled or fail in any way, memory, descriptors and threads are what they were."""

from __future__ import annotations

import functools
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.faulty import Faulty, failing_disk, spec
from tests.models import engine_over, model, prompt
from vericache_core.runtime.sampling_params import SamplingParams

FAULTS = ("compress", "late attend", "extend", "mutate", "")


def live_bytes() -> int:
    gc.collect()
    storages: dict[int, int] = {}
    for found in gc.get_objects():
        if type(found) in {torch.Tensor, torch.nn.Parameter} and not found.is_mkldnn and found.numel():
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


def descriptors() -> int:
    folder = Path("/proc/self/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0


def bad(prefix: tuple[int, ...], logits: Any) -> Any:
    if len(prefix) > 30:
        raise RuntimeError("boom")
    return logits


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_a_hundred_sessions_leave_nothing_behind(tier: str, caplog: pytest.LogCaptureFixture) -> None:
    specs = [spec(f"f{n}", functools.partial(Faulty, fault=fault, state={})) for n, fault in enumerate(FAULTS)]
    ours = engine_over(model("llama"), specs=specs, full_kv=tier, compressor=None, fold=5)

    def session(number: int) -> None:
        name = f"f{number % len(FAULTS)}"
        ids = prompt(20 + number % 7, seed=number)
        kind = number // len(FAULTS) % 5
        params = SamplingParams(max_new_tokens=12)
        if kind == 0:
            ours.generate(ids, params, compressor=name)
        elif kind == 1:  # cancelled in the middle of drafting or verifying
            stream = ours.stream(ids, params, compressor=name)
            next(stream)
            for _ in range(number % 9):
                ours.loop.step()
            stream.close()
        elif kind == 2:  # fails
            ours.generate(ids, SamplingParams(max_new_tokens=12, logits_processors=(bad,)), compressor=name)
        elif kind == 3:
            with failing_disk("EIO", {number % 11, number % 17}):
                ours.generate(ids, params, compressor=name)
        else:  # a stream that is neither finished nor closed, only forgotten
            next(ours.stream(ids, params, compressor=name))

    for number in range(25):
        session(number)
    caplog.clear()
    before = (live_bytes(), descriptors(), threading.active_count())
    for number in range(100 if tier == "disk" else 40):
        session(number)
        caplog.clear()
    assert (live_bytes(), descriptors(), threading.active_count()) == before
    assert not ours.loop.requests
    assert not ours.loop.compression.observed
    assert ours.loop.ring.nbytes == 0
    ours.close()


def test_an_interrupt_mid_run_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = engine_over(model("llama"), full_kv="disk", compressor="random", keep=0.5)
    ours.generate(prompt(20), SamplingParams(max_new_tokens=3))
    before = (live_bytes(), descriptors())
    step, count = ours.adapter.step, [0]

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        if count[0] == 9:
            raise KeyboardInterrupt
        return step(*args, **kwargs)

    monkeypatch.setattr(ours.adapter, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ours.generate([prompt(30), prompt(9)], SamplingParams(max_new_tokens=20))
    assert not ours.loop.requests
    assert (live_bytes(), descriptors()) == before
    monkeypatch.undo()
    (again,) = ours.generate(prompt(30), SamplingParams(max_new_tokens=20))
    assert again.token_ids == ours.generate(prompt(30), SamplingParams(max_new_tokens=20), compressor=None)[0].token_ids
    ours.close()

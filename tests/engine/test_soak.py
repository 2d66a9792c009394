"""Five hundred requests that come, wait, are cancelled and lose swaps: no wrong token, nothing left behind, no standstill."""

from __future__ import annotations

import itertools
import random
from importlib.util import find_spec
from typing import Any

import pytest

from tests.engine.test_leaks import descriptors, live_bytes
from tests.models import build
from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.cache.tiers import DiskStore, HostStore
from vericache_core.errors import SwapError
from vericache_core.outputs import Job
from vericache_core.runtime.admission import QueueFull
from vericache_core.runtime.background import BackgroundVerify

KINDS = 20
REQUESTS = 500
SLOW_LINK = 10e6
"""Bytes a second at which a swap of most prompts here takes longer than a step."""


@pytest.mark.slow
@pytest.mark.parametrize("full_kv", ["host", "disk"])
@pytest.mark.parametrize(
    ("scheduler", "link", "proposer"),
    [
        ("staggered", None, "none"),
        ("lockstep", None, "none"),
        pytest.param("staggered", SLOW_LINK, "ngram", id="background-lookup"),
    ],
)
def test_soak(full_kv: Any, scheduler: Any, link: float | None, proposer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(7)
    prompts = [[draw.randrange(1, 500) for _ in range(draw.choice((3, 20, 60, 130, 200)))] for _ in range(KINDS)]
    if proposer != "none":
        prompts[::2] = [(prompt[:7] * 30)[: len(prompt)] for prompt in prompts[::2]]  # something to look up
    lengths = [draw.choice((2, 9, 30)) for _ in range(KINDS)]
    model = build("llama")
    with Engine(model, config=EngineConfig(rows=16)) as plain:
        params = [SamplingParams(max_new_tokens=count) for count in lengths]
        expected = [output.token_ids for output in plain.generate(prompts, params)]
        alone = max(
            plain.planner.holds(plain.builder.for_prompt(p, s, None)).device for p, s in zip(prompts, params, strict=True)
        )

    failures = 0
    for store, name in itertools.product((HostStore, DiskStore), ("arrive", "fetch")):
        original = getattr(store, name)

        def failing(self: Any, *arguments: Any, _original: Any = original) -> Any:
            nonlocal failures
            if draw.random() < 0.003:
                failures += 1
                raise SwapError("injected")
            return _original(self, *arguments)

        monkeypatch.setattr(store, name, failing)

    start, started = BackgroundVerify.start, 0

    def counted(self: BackgroundVerify, *arguments: Any) -> None:
        nonlocal started
        started += 1
        start(self, *arguments)

    monkeypatch.setattr(BackgroundVerify, "start", counted)
    config = EngineConfig(
        rows=16, compressor="random", keep=0.4, window="auto", full_kv=full_kv, scheduler=scheduler, max_queue=8,
        device_budget=int(alone * 3), swap_dir=None, link_bytes_per_s=link, proposer=proposer,
    )  # fmt: skip
    with Engine(model, config=config) as engine:
        assert engine.adapter.fused_layers or find_spec("numba") is None
        before = (live_bytes(), descriptors())
        jobs: list[tuple[int, Job]] = []
        cancelled: set[int] = set()
        refused = steps = 0
        while len(jobs) < REQUESTS or any(not job.finished for _, job in jobs):
            if len(jobs) < REQUESTS and draw.random() < 0.3:
                kind = draw.randrange(KINDS)
                compressor = draw.choice(("random", "identity", None))
                try:
                    jobs.append(
                        (kind, engine.submit(prompts[kind], params[kind], compressor=compressor, priority=draw.randrange(3)))
                    )
                except QueueFull:
                    refused += 1
            live = [job for _, job in jobs if not job.finished]
            if live and draw.random() < 0.02:
                victim = draw.choice(live)
                victim.cancel()
                cancelled.add(victim.number)
            engine.step()
            assert engine.loop.peak_device_kv_bytes <= config.device_budget  # type: ignore[operator]
            steps += 1
            assert steps < 60_000, "standstill"
        for kind, job in jobs:
            output = job.result()
            assert output.token_ids == expected[kind][: len(output.token_ids)]
            if job.number not in cancelled and output.error is None:
                assert output.token_ids == expected[kind]
            assert output.error is None or isinstance(output.error, SwapError)
        failed = sum(job.result().error is not None for _, job in jobs)
        assert failed < REQUESTS / 50
        assert refused > 0
        assert failures > 0
        assert cancelled
        assert link is None or started > 0
        assert not engine.loop.requests
        assert not engine.loop.scheduler.running
        engine.loop.ring.check_integrity()
        del jobs, job, output, live, victim
        engine.loop.ring.trim()
        assert live_bytes() <= before[0] * 1.01
        assert descriptors() == before[1]

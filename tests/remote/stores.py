"""A store and a drafter over loopback, in one process, over tiny random models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.models import build, model, prompt
from vericache_core.config import EngineConfig
from vericache_core.engine import Engine
from vericache_core.outputs import RequestOutput
from vericache_core.plugins.registry import Registry
from vericache_core.plugins.spec import CompressorSpec
from vericache_core.remote.auth import Guard
from vericache_core.remote.limits import Limits
from vericache_core.remote.server import StoreServer
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.access import read_tokens

TOKEN = "a-token-of-the-tests-0123456789"
PREFIX = prompt(150, seed=3)


def prompts(count: int, own: int = 7) -> list[list[int]]:
    """Prompts that share a prefix of 150 tokens (more than a page)."""
    return [PREFIX + prompt(own + number, seed=100 + number) for number in range(count)]


def token_file(folder: Path, text: str = TOKEN) -> str:
    file = folder / f"token-{abs(hash(text))}"
    file.write_text(text + "\n")
    return str(file)


def registry(specs: Sequence[CompressorSpec] = ()) -> Registry:
    found = Registry(discover=False)
    for spec in specs:
        found.register(spec)
    return found


def store_engine(loaded: Any = None, specs: Sequence[CompressorSpec] = (), **settings: Any) -> Engine:
    chosen = {"rows": 16, "probe": False, "full_kv": "device", **settings}
    return Engine(loaded or model("llama"), None, EngineConfig(**chosen), registry(specs))


@contextmanager
def store(
    folder: Path, engine: Engine | None = None, limits: Limits | None = None, tokens: str = TOKEN, address: str = "127.0.0.1:0"
) -> Iterator[StoreServer]:
    """A running store; it knows one tenant unless ``tokens`` says otherwise."""
    guard = Guard(read_tokens(token_file(folder, tokens)))
    server = StoreServer(engine or store_engine(), address, guard, limits=limits)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def drafter(folder: Path, port: int, loaded: Any = None, specs: Sequence[CompressorSpec] = (), **settings: Any) -> Engine:
    """An engine whose full KV is in the store at ``port``."""
    chosen = {
        "rows": 16,
        "window": 4,
        "probe": False,
        "compressor": "identity",
        "full_kv": "remote",
        "remote": f"127.0.0.1:{port}",
        "remote_token_file": token_file(folder),
        **settings,
    }
    return Engine(loaded or model("llama"), None, EngineConfig(**chosen), registry(specs))


def plain(
    asked: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams], loaded: Any = None
) -> list[RequestOutput]:
    """What one-token-at-a-time decoding with a local full KV gives."""
    with store_engine(loaded) as engine:
        return engine.generate(list(asked), params, compressor=None)


def same(got: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """Every token, and the way each request ended."""
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.error is None, mine.error
        assert mine.token_ids == theirs.token_ids
        assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)


def other_model(seed: int = 1) -> Any:
    """A model of the same shape with other weights."""
    return build("llama", torch.float32, seed)

"""A tiny model behind HTTP, in this process: calls go over a real socket."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.models import build, engine_over
from vericache_core.engine import Engine
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.serve.app import Server
from vericache_core.serve.runner import Runner

MODEL = "tiny"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
CALLING = (
    "{% if tools %}{{ tools | tojson + '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role + ': ' + m.content }}"
    "{% for call in m.tool_calls or [] %}"
    """{{ '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}"""
    "{{ '}\\n</tool_call>' }}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
"""A chat template that knows tools."""
DEFAULTS = SamplingParams(max_new_tokens=24)


def byte_tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """A token for each byte, and a chat template."""
    core = Tokenizer(
        models.BPE({token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, [])
    )
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template)


def tiny_engine(**settings: Any) -> Engine:
    """A random Llama over bytes that drafts with half of its KV."""
    return engine_over(build("llama", vocab_size=256), byte_tokenizer(), **{"compressor": "random", "keep": 0.5, **settings})


class Repeats:
    """Has the model write what the last message of a chat says, and end there if it knows the token ``end``."""

    def __init__(self, end: int | None = None) -> None:
        self._end = end
        self._tokens: list[int] | None = None

    def clone(self) -> Repeats:
        return Repeats(self._end)

    def __call__(self, prefix: tuple[int, ...], logits: Tensor) -> Tensor:
        if self._tokens is None:
            tokenizer = byte_tokenizer()
            said = tokenizer.decode(prefix).removesuffix("\nassistant: ").rpartition("user: ")[2]
            self._tokens = [*tokenizer.encode(said), *([] if self._end is None else [self._end])]
        token = self._tokens.pop(0)
        masked = torch.full_like(logits, float("-inf"))
        masked[token] = logits[token]
        return masked


@dataclass(frozen=True)
class Answer:
    """Status, headers in lower case, and body of an answer."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def events(self) -> list[Any]:
        """What a stream sent, without its end; raises AssertionError where the end is missing."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


@dataclass(frozen=True)
class Served:
    """A running server."""

    engine: Engine
    runner: Runner
    port: int
    stopping: threading.Event

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, path: str, body: Any = None, method: str = "POST", headers: dict[str, str] | None = None) -> Answer:
        """One call; ``body`` is sent as it is when it is bytes, else as JSON."""
        connection = self.connect()
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            connection.request(method, path, sent, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return Answer(answer.status, headers, answer.read().decode())
        finally:
            connection.close()

    def wait_until_idle(self, seconds: float = 60) -> None:
        """Wait until nobody waits for an answer and the engine has nothing left."""
        end = time.monotonic() + seconds
        while self.runner.in_flight or self.engine.loop.live:
            assert time.monotonic() < end, "something is still running"
            time.sleep(0.02)


@contextmanager
def served(engine: Engine, tokens: dict[str, bytes] | None = None, defaults: SamplingParams = DEFAULTS) -> Iterator[Served]:
    """Serve ``engine`` on a free port; closes all of it at the end."""
    stopping, runner = threading.Event(), Runner(engine)
    app = Server(runner, MODEL, defaults, engine.config.compressor, tokens, stopping, engine).app
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_graceful_shutdown=5))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        runner.start()
        thread.start()
        try:
            yield Served(engine, runner, listening.getsockname()[1], stopping)
        finally:
            runner.close()
            server.should_exit = True
            thread.join()
            engine.close()

"""The proxy that the remote benchmark delays its link with: every byte, in order, later by so much, and no end is lost."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "delay.py"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_delay", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


delay = load()


async def through(
    serve: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    use: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
    seconds: float = 0.01,
) -> None:
    """``use`` a connection through the proxy to a server that does ``serve``."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy, port = await delay.start("127.0.0.1", server.sockets[0].getsockname()[1], seconds)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await asyncio.wait_for(use(reader, writer), 60)
    finally:
        writer.close()
        proxy.close()
        server.close()
        await settled()


async def settled() -> None:
    """Wait until nothing is under way: every connection has ended by itself."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, left = await asyncio.wait(others, timeout=60)
        assert not left, "a connection was left open"
    for _ in range(5):
        await asyncio.sleep(0.001)


def test_every_byte_comes_in_order_both_ways() -> None:
    draw = random.Random(1)
    there, back = draw.randbytes(3_000_017), draw.randbytes(2_000_003)
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def answer() -> None:
            for start in range(0, len(back), 70_001):
                writer.write(back[start : start + 70_001])
                await writer.drain()
            writer.write_eof()

        answering = asyncio.ensure_future(answer())
        seen.append(await reader.read(-1))
        await answering
        writer.close()

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def ask() -> None:
            start = 0
            while start < len(there):
                count = draw.randint(1, 200_000)
                writer.write(there[start : start + count])
                await writer.drain()
                start += count
            writer.write_eof()

        asking = asyncio.ensure_future(ask())
        assert await reader.read(-1) == back
        await asking
        while not seen:
            await asyncio.sleep(0.001)

    asyncio.run(through(serve, use))
    assert seen == [there]


def test_an_answer_comes_after_the_question_has_ended() -> None:
    """The end of one direction does not end the other."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = await reader.read(-1)
        writer.write(asked[::-1] * 1000)
        writer.close()

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"abc")
        writer.write_eof()
        assert await reader.read(-1) == b"cba" * 1000

    asyncio.run(through(serve, use))


def test_a_round_trip_is_later_by_twice_the_delay() -> None:
    """Only that it is not sooner: that much is certain on any machine."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        for _ in range(3):
            began = now()
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
            assert now() - began >= 2 * 0.05

    asyncio.run(through(serve, use, seconds=0.05))


class Sink:
    """A writer that notes when it was written to."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.written: list[tuple[float, bytes]] = []

    def write(self, data: bytes) -> None:
        self.written.append((self.clock(), data))

    async def drain(self) -> None:
        await asyncio.sleep(0)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.written.append((self.clock(), b""))


def test_pieces_under_way_together_are_not_delayed_twice() -> None:
    """On a clock of our own: a piece each 2 s, each 10 s under way."""
    time = 0.0

    async def sleep(seconds: float) -> None:
        until = time + seconds
        while time < until:
            await asyncio.sleep(0)

    async def run() -> None:
        nonlocal time
        reader, sink = asyncio.StreamReader(), Sink(lambda: time)
        carrying = asyncio.ensure_future(delay.carry(reader, sink, 10.0, lambda: time, sleep))
        for tick in range(40):
            if tick < 10 and tick % 2 == 0:
                reader.feed_data(bytes([tick]))
            if tick == 10:
                reader.feed_eof()
            for _ in range(20):
                await asyncio.sleep(0)
            time += 1.0
        await carrying
        assert sink.written == [*((10.0 + tick, bytes([tick])) for tick in range(0, 10, 2)), (20.0, b"")]

    asyncio.run(run())


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_connection_that_is_cut_is_cut_on_the_other_side(side: str) -> None:
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        if side == "server":
            writer.transport.abort()
        else:
            with_it = await reader.read(-1)
            assert with_it == b""
        ended.set()
        writer.close()

    async def use(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"x")
        if side == "server":
            try:
                assert await reader.read(-1) == b""
            except ConnectionError:
                return
        else:
            await asyncio.sleep(0.05)
            writer.transport.abort()
            await ended.wait()

    asyncio.run(through(serve, use))


def test_nobody_beyond_is_a_closed_connection() -> None:
    async def run() -> None:
        proxy, port = await delay.start("127.0.0.1", 1, 0.0)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await asyncio.wait_for(reader.read(-1), 60) == b""
        writer.close()
        proxy.close()
        await settled()

    asyncio.run(run())


def test_the_program_says_where_it_listens_and_ends_with_its_input() -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(await reader.readexactly(3))
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        command = [sys.executable, "-S", str(PROGRAM), target, "--delay-ms", "1"]
        process = await asyncio.create_subprocess_exec(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdin is not None
        host, _, port = (await process.stdout.readline()).decode().strip().rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"abc")
        assert await asyncio.wait_for(reader.read(-1), 60) == b"abc"
        writer.close()
        process.stdin.close()
        assert await asyncio.wait_for(process.wait(), 60) == 0
        server.close()
        await settled()

    asyncio.run(run())

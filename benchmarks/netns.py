"""Two network namespaces on one machine, joined by a link of limited rate; a proxy for delay (this needs no ``netem``)."""

from __future__ import annotations

import asyncio
import os
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STORE, DRAFTER = "10.77.31.1", "10.77.31.2"


@contextmanager
def linked(rate: float) -> Iterator[tuple[str, str]]:
    """Two namespaces, joined by a veth pair that carries ``rate`` Mbit/s each way; gone at the end, whatever happens."""
    mark = f"vc{os.getpid()}"
    names, ends = (f"{mark}s", f"{mark}d"), (f"{mark}v0", f"{mark}v1")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, (STORE, DRAFTER), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
            limit = ("rate", f"{rate:g}mbit", "burst", "256kb", "latency", "50ms")
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *limit], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *arguments], check=True)


def delaying(host: str, port: int, seconds: float) -> str:
    """Address of a proxy to ``host:port`` in this process, each way later by ``seconds``; order and rate stay."""
    ready: queue.SimpleQueue[int] = queue.SimpleQueue()
    threading.Thread(target=lambda: asyncio.run(_proxy(host, port, seconds, ready.put)), daemon=True).start()
    return f"127.0.0.1:{ready.get()}"


async def _proxy(host: str, port: int, seconds: float, ready: Callable[[int], None]) -> None:

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(4096)

        async def deliver() -> None:
            while True:
                due, data = await under_way.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not data:
                    writer.close()
                    return
                writer.write(data)
                await writer.drain()

        delivery = asyncio.create_task(deliver())
        while True:
            data = await reader.read(1 << 16)
            await under_way.put((time.monotonic() + seconds, data))
            if not data:
                break
        await delivery

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer), return_exceptions=True)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    ready(server.sockets[0].getsockname()[1])
    await server.serve_forever()

"""A TCP proxy that hands everything on later: the one-way delay of a long link, in order and as fast as it came.

Standard library only, so that it starts at once: ``python benchmarks/delay.py HOST:PORT --delay-ms 20`` prints the address that
it listens at (127.0.0.1, a free port) and ends with its standard input. Each way is later by the delay, and so is the
handshake of a connection, by both. Not imitated: what a real long link does to the windows of TCP, since each half of a
connection is acknowledged on its own side.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

PIECE = 1 << 16
PIECES = 1024
"""Pieces under way in one direction, 64 MiB at most: 1 Gbit/s for half a second."""


async def start(host: str, port: int, seconds: float) -> tuple[asyncio.AbstractServer, int]:
    """Start to listen; returns the server, to be closed, and its port."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            await asyncio.sleep(2 * seconds)  # the handshake of the connection beyond
            far_reader, far_writer = await asyncio.open_connection(host, port)
            ends.append(far_writer)
            await _together(carry(reader, far_writer, seconds), carry(far_reader, writer, seconds))
        except (OSError, asyncio.CancelledError):
            pass  # one end was cut, so the other is, too; or the program ends
        finally:
            for end in ends:
                end.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def carry(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    seconds: float,
    clock: Callable[[], float] | None = None,
    sleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep,
) -> None:
    """One direction: what is read is written ``seconds`` after it came, the end as well."""
    now = clock or asyncio.get_running_loop().time
    under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(PIECES)

    async def read() -> None:
        data = b"-"
        while data:
            data = await reader.read(PIECE)
            await under_way.put((now() + seconds, data))

    async def write() -> None:
        while True:
            due, data = await under_way.get()
            await sleep(max(0.0, due - now()))
            if not data:
                break
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()  # the other direction may go on

    await _together(read(), write())


async def _together(*work: Coroutine[Any, Any, None]) -> None:
    """Run until all are done or one fails; none is left running."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def main(target: str, seconds: float) -> None:
    """Serve until standard input ends."""
    host, _, port = target.rpartition(":")
    server, listening = await start(host, int(port), seconds)
    print(f"127.0.0.1:{listening}", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", metavar="HOST:PORT")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="each way [%(default)s]")
    given = parser.parse_args()
    asyncio.run(main(given.target, given.delay_ms / 1e3))

"""Two network namespaces on one machine, joined by a link of limited rate; a proxy for delay (this needs no ``netem``)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STORE, DRAFTER = "10.77.31.1", "10.77.31.2"
_HERTZ = 250


@dataclass(frozen=True)
class Link:
    """Names of the namespaces of the store and of the drafter, and of the ends of the pair between them."""

    store: str
    drafter: str
    ends: tuple[str, str]

    def limit(self, rate: float) -> None:
        """Let ``rate`` Mbit/s through each way from now on."""
        burst = max(256 << 10, int(rate * 1e6 / 8 / _HERTZ))  # a bucket that is filled once a tick must hold a tick
        limit = ("rate", f"{rate:g}mbit", "burst", str(burst), "latency", "50ms")
        for name, end in zip((self.store, self.drafter), self.ends, strict=True):
            subprocess.run(["tc", "-n", name, "qdisc", "replace", "dev", end, "root", "tbf", *limit], check=True)


@contextmanager
def linked(rate: float) -> Iterator[Link]:
    """Two namespaces, joined by a veth pair that carries ``rate`` Mbit/s each way; gone at the end, whatever happens."""
    mark = f"vc{os.getpid()}"
    link = Link(f"{mark}s", f"{mark}d", (f"{mark}v0", f"{mark}v1"))
    names = (link.store, link.drafter)
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", link.ends[0], "type", "veth", "peer", "name", link.ends[1])
        for name, end, address in zip(names, link.ends, (STORE, DRAFTER), strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        link.limit(rate)
        yield link
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    """Run ``ip``."""
    subprocess.run(["ip", *arguments], check=True)


@contextmanager
def delayed(namespace: str, target: str, milliseconds: float) -> Iterator[str]:
    """Where ``target`` answers within a namespace with so much delay each way: a proxy process, unless there is none."""
    if not milliseconds:
        yield target
        return
    program = str(Path(__file__).with_name("delay.py"))
    command = ["ip", "netns", "exec", namespace, sys.executable, "-S", program, target, "--delay-ms", f"{milliseconds:g}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()  # it ends by itself then
            process.wait()

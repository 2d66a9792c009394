"""The store and a drafter with the very arguments of the manifests: other paths and ports, a tiny model, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.deploy.manifests import command_lines
from tests.remote.test_process import folder as model_folder  # noqa: F401  (a fixture)
from tests.remote.test_tls import Authority

DEADLINE = 600.0
"""Seconds until a process counts as hung: its start takes six of processor time, which others may have."""


def localized(arguments: list[str], files: dict[str, str]) -> list[str]:
    """The same options, with values of this machine where the manifests name ports, names and mounted files."""
    made = []
    for text in arguments:
        name, equals, _ = text.partition("=")
        made.append(f"{name}={files[name]}" if equals and name in files else text)
    return made


def start(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vericache_core", *arguments, "--rows=16", "--no-probe"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def wait_ready(port: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + DEADLINE
    while time.monotonic() < until:
        assert process.poll() is None, process.communicate()[1]
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                assert answer.status == 200
                return
        except OSError:  # also the timeout of an answer that a busy machine has not sent
            time.sleep(0.1)
    raise AssertionError("not ready")


def free_ports(count: int) -> list[int]:
    import socket

    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(made.getsockname()[1]) for made in sockets]
    for made in sockets:
        made.close()
    return ports


@pytest.mark.slow
@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_the_roles_of_the_manifests_find_each_other_and_stop_in_order(
    where: str,
    model_folder: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    verify, store_metrics, drafter_metrics = free_ports(3)
    authority = Authority(tmp_path, "ca")
    store_cert, store_key = authority.issue("store")
    drafter_cert, drafter_key = authority.issue("drafter")
    token = tmp_path / "token"
    token.write_text("a-token-of-this-test-0123456789abcdef\n")
    common = {"--model": str(model_folder), "--token-file": str(token)}
    lines = command_lines()
    store = start(
        localized(
            lines[f"{where} store"],
            {
                **common,
                "--listen": f"127.0.0.1:{verify}",
                "--metrics": f"127.0.0.1:{store_metrics}",
                "--tls-cert": store_cert,
                "--tls-key": store_key,
                "--client-ca": authority.file,
                "--swap-dir": str(tmp_path),
            },
        )
    )
    processes = [store]
    try:
        wait_ready(store_metrics, store)
        drafter = start(
            localized(
                lines[f"{where} drafter"],
                {
                    **common,
                    "--remote": f"127.0.0.1:{verify}",
                    "--metrics": f"127.0.0.1:{drafter_metrics}",
                    "--tls-cert": drafter_cert,
                    "--tls-key": drafter_key,
                    "--server-ca": authority.file,
                },
            )
        )
        processes.append(drafter)
        wait_ready(drafter_metrics, drafter)
        assert drafter.stdin is not None
        assert drafter.stdout is not None
        drafter.stdin.write(json.dumps({"id": 1, "prompt": "the quick brown fox " * 20}) + "\n")
        drafter.stdin.flush()
        answer = json.loads(drafter.stdout.readline())
        assert answer["mode"] == "remote"
        assert answer["token_ids"]
        assert not answer["degraded"]
        with urllib.request.urlopen(f"http://127.0.0.1:{drafter_metrics}/metrics", timeout=10) as scraped:
            text = scraped.read().decode()
        assert 'vericache_drafts_total{compressor="snapkv"}' in text
        for process in (drafter, store):
            process.send_signal(signal.SIGTERM)
            _, logged = process.communicate(timeout=DEADLINE)
            assert process.returncode == 0
            assert any(json.loads(line)["message"] == "draining" for line in logged.splitlines() if line.startswith("{"))
    finally:
        for process in processes:
            process.kill()
            process.communicate()

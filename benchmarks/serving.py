"""What serving costs: clients of ``vericache serve``, all at once, against the same engine called in process.

Both decode the same prompts greedily with the same settings, in turn: a batch by ``Engine.generate``, one by as many
clients as prompts over HTTP, and one by clients that stream. The texts must be the same. A figure is tokens per
second from the first call to the last answer, prefill included.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

from vericache_core import Engine, EngineConfig, SamplingParams


@contextlib.contextmanager
def server(flags: Sequence[str]) -> Iterator[str]:
    """A ``vericache serve`` on a free port; gives ``HOST:PORT`` once it takes calls."""
    command = [sys.executable, "-m", "vericache_core", "serve", *flags, "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            if not ready:
                raise SystemExit("the server did not start; its reason is above")
            yield urlsplit(json.loads(ready)["url"]).netloc
        finally:
            process.terminate()


def ask(address: str, prompt: Sequence[int], tokens: int, *, stream: bool) -> str:
    """The text of one answer."""
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    with contextlib.closing(http.client.HTTPConnection(address)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse().read().decode()
    if not stream:
        return str(json.loads(answer)["choices"][0]["text"])
    events = [line[6:] for line in answer.splitlines() if line.startswith("data: ")]
    if not events or events.pop() != "[DONE]":
        raise SystemExit(f"the stream broke off: {answer[-300:]}")
    return "".join(choice["text"] for event in events for choice in json.loads(event)["choices"])


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--context", type=int, default=300, help="tokens of each prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    flags = ["-m", args.model, "-c", "snapkv", "--keep", "0.25", "--window", "auto", "--dtype", "bfloat16"]
    config = EngineConfig(dtype="bfloat16", compressor="snapkv", options={"keep": 0.25}, window="auto")
    engine = Engine.from_pretrained(args.model, config)
    with engine, server(flags) as address, ThreadPoolExecutor(args.clients) as clients:
        text = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
        ids = engine.tokenizer.encode(text)
        prompts = [ids[at * args.context : (at + 1) * args.context] for at in range(args.clients)]
        params = SamplingParams(max_new_tokens=args.new_tokens, ignore_eos=True)

        def over_http(stream: bool) -> list[str]:
            return list(clients.map(lambda prompt: ask(address, prompt, args.new_tokens, stream=stream), prompts))

        ways: dict[str, Callable[[], list[str]]] = {
            "in process": lambda: [output.text for output in engine.generate(prompts, params)],
            "clients": lambda: over_http(False),
            "clients that stream": lambda: over_http(True),
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        texts = {name: way() for name, way in ways.items()}  # to warm up
        assert all(found == texts["in process"] for found in texts.values()), "the server answers otherwise"
        for _ in range(args.repeats):
            for name, way in ways.items():
                started = time.perf_counter()
                assert way() == texts[name]
                rates[name].append(args.clients * args.new_tokens / (time.perf_counter() - started))
    print("| way | tokens/s | least..most | of the engine in process |")
    print("|---|---|---|---|")
    for name, found in rates.items():
        ratios = [one / other for one, other in zip(found, rates["in process"], strict=True)]
        middle, ratio = statistics.median(found), statistics.median(ratios)
        spread, ratio_spread = f"{min(found):.1f}..{max(found):.1f}", f"{min(ratios):.2f}..{max(ratios):.2f}"
        print(f"| {name} | {middle:.1f} | {spread} | {ratio:.2f} ({ratio_spread}) |")


if __name__ == "__main__":
    main()

"""Proves and measures the CUDA path: kernels beside their references, engines beside plain decoding, bytes per second.

``python benchmarks/gpu.py`` on a machine with a CUDA device runs three parts and stops at the first that fails:

1. kernels: every Triton kernel against its torch reference, and rows of the fixed-block attention bit for bit in
   other company;
2. identity: engines over random-weight models with the row-invariance probe on, drafting with every installed
   compressor on the device, host and disk tiers, against plain decoding of the same engine: tokens, logits;
3. speed: one decode step over a long context against torch's SDPA on the full bfloat16 KV; the bytes are those
   that the kernel has to read (codes, scales, exact rows).

``--checks`` leaves out the third part. With ``TRITON_INTERPRET=1`` and ``--device cpu`` the checks run without a GPU.
Exit status: 1 if something differs, 2 without a CUDA device. ``--json`` prints one JSON document on standard output.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.attention.online import AttentionState
from vericache_core.attention.paged import AttentionJob, attend_reference
from vericache_core.cache.pages import PAGE, PagedRows
from vericache_core.coded import CodedLayer
from vericache_core.context import CompressContext
from vericache_core.kv import LayerDescriptor, PrefixView
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.graphs import capture_steps
from vericache_core.packing import SUPPORTED_BITS, pack
from vericache_core.plugins.registry import default_registry

CODED = (
    ("kivi", {"bits": 2, "group": 16}),
    ("kivi", {"bits": 4, "group": 16}),
    ("turboquant", {"bits": 3}),
    ("turboquant", {"bits": 4, "values": "uniform"}),
)
"""Compressors with fused kernels; those that are not installed are left out."""


class DifferenceError(Exception):
    """A kernel or an engine gave something else than its reference."""


@dataclass(frozen=True)
class Row:
    """One measurement: ``seconds`` is the median of one decode step of one layer."""

    kernel: str
    context: int
    batch: int
    bytes: int
    seconds: float
    bytes_per_second: float
    times_sdpa: float


@dataclass(frozen=True)
class GraphRow:
    """A step of ``rows`` rows without its attention, launched one by one and as graphs: medians."""

    rows: int
    seconds: float
    graph_seconds: float
    times: float


@dataclass(frozen=True)
class Shape:
    """Heads and widths of the layer that is measured."""

    heads: int
    kv_heads: int
    head_dim: int

    def layer(self, dtype: torch.dtype = torch.bfloat16) -> LayerDescriptor:
        width = self.head_dim
        return LayerDescriptor(0, "full", self.heads, self.kv_heads, width, width, dtype, width**-0.5)


def note(text: str) -> None:
    """Tell the user; standard output is for results."""
    print(text, file=sys.stderr, flush=True)


def require(close: bool, what: str) -> None:
    """Raise unless ``close``."""
    if not close:
        raise DifferenceError(what)


def random_rows(layer: LayerDescriptor, tokens: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor]:
    """Keys and values ``[kv_heads, tokens, width]``."""
    draw = torch.Generator(device).manual_seed(seed)
    shape = (layer.kv_heads, tokens, layer.head_dim)
    keys, values = (torch.randn(shape, generator=draw, device=device).to(layer.dtype) for _ in range(2))
    return keys, values


def filled(layer: LayerDescriptor, tokens: int, device: torch.device, seed: int) -> PagedRows:
    """Pages with ``tokens`` random rows and room for more."""
    pages = PagedRows(layer, device)
    pages.reserve(tokens + PAGE)
    pages.append(*random_rows(layer, tokens, device, seed))
    return pages


def step_rows(layer: LayerDescriptor, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Query ``[rows, heads, head_dim]`` float32, scaled, and new key and value rows."""
    draw = torch.Generator(device).manual_seed(rows)
    query = torch.randn((rows, layer.heads, layer.head_dim), generator=draw, device=device) * layer.scaling
    keys, values = random_rows(layer, rows, device, rows)
    return query, keys.transpose(0, 1), values.transpose(0, 1)


def installed() -> list[tuple[str, dict[str, Any]]]:
    """``CODED`` without what is not installed."""
    names = set(default_registry().names())
    return [(name, dict(options)) for name, options in CODED if name in names]


def coded_layer(name: str, options: dict[str, Any], layer: LayerDescriptor, tokens: int, device: torch.device) -> CodedLayer:
    """Random rows, compressed."""
    keys, values = random_rows(layer, tokens, device, 7)
    compressor = default_registry().create(name, options)
    made = compressor.compress(PrefixView.from_tensors([layer], [keys], [values]), CompressContext()).layers[0]
    assert isinstance(made, CodedLayer)
    return made


# -- part 1 --------------------------------------------------------------------------------------------


def check_kernels(device: torch.device, shapes: Sequence[Shape]) -> int:
    """Compare every kernel with its reference; returns the number of comparisons."""
    from vericache_core.attention.triton_bits import pack_triton, unpack_triton

    done = 0
    for bits in SUPPORTED_BITS:
        codes = torch.randint(0, 1 << bits, (5, 1003), dtype=torch.uint8, device=device)
        require(torch.equal(pack_triton(codes, bits), pack(codes, bits)), f"pack of {bits} bits")
        require(torch.equal(unpack_triton(pack(codes, bits), bits, 1003), codes), f"unpack of {bits} bits")
        done += 2
    for shape in shapes:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            check_pages(shape.layer(dtype), device)
            done += 2
        for name, options in installed():
            check_codes(name, options, shape.layer(), device)
            done += 1
    return done


def check_pages(layer: LayerDescriptor, device: torch.device) -> None:
    """The fixed-block attention against its reference, and a row's bits alone against those in company."""
    from vericache_core.attention.triton_paged import CHUNK, attend_triton

    length, rows, label = CHUNK + PAGE - 3, 6, f"attention over pages, {layer.heads}/{layer.kv_heads} heads of {layer.head_dim}"
    query, keys, values = step_rows(layer, rows, device)
    answers = []
    for attend in (attend_triton, attend_reference):
        pages = filled(layer, length, device, 1)
        answers.append(attend(query, keys, values, [AttentionJob(0, rows, pages, pages.lengths, length)]))
    require(torch.allclose(answers[0], answers[1], atol=1e-4, rtol=1e-4), f"{label} {layer.dtype}")
    pages = filled(layer, length, device, 1)
    for row in range(rows):
        one = [torch.zeros_like(part) for part in (query, keys, values)]
        for target, part in zip(one, (query, keys, values), strict=True):
            target[rows - 1] = part[row]
        job = AttentionJob(rows - 1, 1, pages, pages.lengths, length + row)
        alone = attend_triton(one[0], one[1], one[2], [job])[rows - 1]
        pages.grow_lengths(1)
        require(torch.equal(alone, answers[0][row]), f"bits of row {row}, {label} {layer.dtype}")


def check_codes(name: str, options: dict[str, Any], layer: LayerDescriptor, device: torch.device) -> None:
    """Fused attention against decoding and folding."""
    from vericache_core.attention import fused

    held = coded_layer(name, options, layer, 700, device)
    query = step_rows(layer, 1, device)[0].transpose(0, 1).contiguous()
    expected, found = (AttentionState.fresh(layer.heads, 1, layer.head_dim, device) for _ in range(2))
    with mock.patch.object(fused, "runs_on", return_value=False):
        held.attend(query, expected)
    with mock.patch.object(fused, "runs_on", return_value=True):
        held.attend(query, found)
    require(torch.allclose(found.output(), expected.output(), atol=1e-3, rtol=1e-3), f"attention over {name} {options}")


# -- part 2 --------------------------------------------------------------------------------------------


def small_model(dtype: torch.dtype, device: torch.device) -> Any:
    """A random-weight Llama with grouped heads of 64."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=997,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3)
    return model.to(device, dtype).eval()


def engines(small: bool) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """``(compressor, options, tier, attention)`` of every cell."""
    names: list[tuple[str, dict[str, Any]]] = [("random", {"keep": 0.3}), ("adversarial", {})]
    names += [(name, options | ({"residual": 32} if name == "kivi" else {})) for name, options in installed()]
    for name, options in names[:1] if small else names:
        for tier in ("host",) if small else ("device", "host", "disk"):
            yield name, options, tier, "triton"
    if not small:
        yield "random", {"keep": 0.3}, "host", "reference"


def check_engines(device: torch.device, small: bool) -> list[dict[str, Any]]:
    """Probe, then identity of drafting engines with plain decoding; one record a cell."""
    records = []
    params = SamplingParams(max_new_tokens=4 if small else 48)
    lengths = (9,) if small else (300, 17, 131)
    prompts = [torch.randint(0, 997, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]
    for dtype in (torch.float32,) if small else (torch.float32, torch.bfloat16):
        model = small_model(dtype, device)
        for name, options, tier, attention in engines(small):
            config = EngineConfig(
                compressor=name,
                options=options,
                full_kv=tier,  # type: ignore[arg-type]  # one of its words
                attention=attention,  # type: ignore[arg-type]
                rows=4 if small else 32,
                window=2 if small else 6,
                fold=40,
                probe=not small,
            )
            started = time.perf_counter()
            with Engine(model, None, config) as engine:
                expected = engine.generate(prompts, params, compressor=None, record_logits=True)
                found = engine.generate(prompts, params, record_logits=True)
            same = all(_same(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
            degraded = [text for output in found for text in output.metrics.degraded]
            record = {
                "dtype": str(dtype).removeprefix("torch."),
                "compressor": name,
                "options": options,
                "tier": tier,
                "attention": attention,
                "identical": same,
                "accepted": sum(output.metrics.accepted for output in found),
                "drafted": sum(output.metrics.drafted for output in found),
                "swap_bytes": sum(output.metrics.swap_bytes for output in found),
                "degraded": degraded,
                "seconds": round(time.perf_counter() - started, 2),
            }
            records.append(record)
            note(json.dumps(record))
            require(same and not degraded, f"{name} {options} on {tier}, {dtype}: {degraded or 'other tokens or logits'}")
    return records


def check_graphs(device: torch.device) -> list[dict[str, Any]]:
    """Engines with and without CUDA graphs, plain and drafting: tokens and logits bit for bit."""
    records = []
    params = SamplingParams(max_new_tokens=48)
    prompts = [torch.randint(0, 997, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (9, 71)]
    for dtype in (torch.float32, torch.bfloat16):
        outputs: list[Any] = []
        shapes: tuple[int, ...] = ()
        refused: str | None = None
        for graphs in ("never", "auto"):
            config = EngineConfig(
                compressor="random",
                options={"keep": 0.3},
                attention="triton",
                rows=32,
                window=6,
                graphs=graphs,
            )
            with Engine(small_model(dtype, device), None, config) as engine:
                plain = engine.generate(prompts, params, compressor=None, record_logits=True)
                outputs.append(plain + engine.generate(prompts, params, record_logits=True))
                if engine.adapter.graphs is not None:
                    shapes = engine.adapter.graphs.shapes
                refused = engine.adapter.graphs_refused
        same = all(_same(mine, theirs) for mine, theirs in zip(*outputs, strict=True))
        records.append({"dtype": str(dtype).removeprefix("torch."), "captured": shapes, "refused": refused, "identical": same})
        note(json.dumps(records[-1]))
        require(same, f"engines with CUDA graphs, {dtype}")
        require(bool(shapes), f"nothing was captured: {refused}")
    return records


def _same(mine: Any, theirs: Any) -> bool:
    if mine.error is not None or mine.token_ids != theirs.token_ids:
        return False
    return torch.equal(mine.logits, theirs.logits)


# -- part 3 --------------------------------------------------------------------------------------------


def measure(run: Callable[[], object], repeats: int) -> float:
    """Median seconds of one call, on the device's own clock."""
    for _ in range(3):
        run()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times)


def by_sdpa(layer: LayerDescriptor, context: int, batch: int, device: torch.device) -> Callable[[], object]:
    """One query row a request by torch itself, over the full KV."""
    shape = (batch, layer.kv_heads, context, layer.head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=layer.dtype) for _ in range(2))
    query = torch.randn(batch, layer.heads, 1, layer.head_dim, device=device, dtype=layer.dtype)
    return lambda: torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)


def by_pages(layer: LayerDescriptor, context: int, batch: int, device: torch.device) -> Callable[[], object]:
    """The fixed-block attention of one row a request, storing included."""
    from vericache_core.attention.triton_paged import attend_triton

    query, keys, values = step_rows(layer, batch, device)
    caches = [filled(layer, context - 1, device, seed) for seed in range(batch)]
    jobs = [AttentionJob(i, 1, pages, pages.lengths, context - 1) for i, pages in enumerate(caches)]
    return lambda: attend_triton(query, keys, values, jobs)


def by_codes(layer: LayerDescriptor, held: Sequence[CodedLayer], device: torch.device) -> Callable[[], object]:
    """One row of each request over its codes."""
    query = step_rows(layer, 1, device)[0].transpose(0, 1).contiguous()

    def run() -> None:
        for one in held:
            one.attend(query, AttentionState.fresh(layer.heads, 1, layer.head_dim, device))

    return run


def speed(device: torch.device, shape: Shape, context: int, batch: int, repeats: int) -> list[Row]:
    """One decode step of one layer for ``batch`` requests of ``context`` tokens, by each kernel."""
    layer = shape.layer()
    full = batch * context * layer.token_bytes
    base = measure(by_sdpa(layer, context, batch, device), repeats)
    rows = [Row("sdpa, full bf16", context, batch, full, base, full / base, 1.0)]

    def add(kernel: str, size: int, run: Callable[[], object]) -> None:
        seconds = measure(run, repeats)
        rows.append(Row(kernel, context, batch, size, seconds, size / seconds, base / seconds))

    add("pages, full bf16", full, by_pages(layer, context, batch, device))
    add("pages, keep 0.25", full // 4, by_pages(layer, context // 4, batch, device))
    for name, options in installed():
        held = [coded_layer(name, options, layer, context, device) for _ in range(batch)]
        label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
        add(label, sum(one.nbytes for one in held), by_codes(layer, held, device))
    return rows


class _NoAttention:
    """Answers zeros, which costs next to nothing, with and without graphs alike."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        return query.new_zeros((*query.shape[:2], value.shape[2]))


def graph_speed(device: torch.device, shape: Shape, rows: Sequence[int], repeats: int) -> list[GraphRow]:
    """Steps of a random-weight Llama of 8 layers with heads of ``shape``, bfloat16; both ways give the same logits."""
    width = shape.heads * shape.head_dim
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 7 // 2,
        num_hidden_layers=8,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    found = []
    for count in rows:
        adapter = ModelAdapter(model, count)
        step = functools.partial(adapter.step, [7] * count, list(range(count)), _NoAttention())
        plain, expected = measure(step, repeats), step()
        capture_steps(adapter, "auto")
        require(adapter.graphs is not None, f"nothing was captured: {adapter.graphs_refused}")
        graph = measure(step, repeats)
        require(torch.equal(step(), expected), f"logits of a graph of {count} rows")
        found.append(GraphRow(count, plain, graph, plain / graph))
    return found


def graph_table(rows: Sequence[GraphRow]) -> str:
    """The steps for people."""
    lines = [f"{'STEP WITHOUT ATTENTION':<32}{'ROWS':>9}{'LAUNCHED, us':>14}{'GRAPH, us':>12}{'TIMES':>8}"]
    lines += [
        f"{'8 layers':<32}{row.rows:>9}{row.seconds * 1e6:>14.1f}{row.graph_seconds * 1e6:>12.1f}{row.times:>8.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def table(rows: Sequence[Row]) -> str:
    """The measurements for people."""
    lines = [f"{'KERNEL':<32}{'CONTEXT':>9}{'BATCH':>7}{'MiB':>10}{'MICROSECONDS':>14}{'GB/s':>9}{'x SDPA':>8}"]
    lines += [
        f"{row.kernel:<32}{row.context:>9}{row.batch:>7}{row.bytes / 2**20:>10.1f}{row.seconds * 1e6:>14.1f}"
        f"{row.bytes_per_second / 1e9:>9.0f}{row.times_sdpa:>8.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the three parts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu under TRITON_INTERPRET=1")
    parser.add_argument("--checks", action="store_true", help="leave out the measurements")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--context", type=int, nargs="+", default=[4096, 32768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of a table")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and (device.type != "cuda" or not torch.cuda.is_available()):
        note("no CUDA device: nothing was checked or measured (TRITON_INTERPRET=1 with --device cpu runs the checks)")
        return 2
    mine = Shape(arguments.heads, arguments.kv_heads, arguments.head_dim)
    shapes = [mine, *(Shape(group * 2, 2, width) for group, width in ((1, 64), (7, 80), (4, 96), (2, 256)))]
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(device) if device.type == "cuda" else "interpreter"}
    report["torch"] = torch.__version__
    try:
        report["kernel_comparisons"] = check_kernels(device, shapes[1:3] if interpreted else shapes)
        note(f"{report['kernel_comparisons']} kernel comparisons agree")
        report["engines"] = check_engines(device, interpreted)
        note(f"{len(report['engines'])} engines decode as without a compressor")
        report["graphs"] = [] if interpreted else check_graphs(device)
        rows: list[Row] = []
        steps: list[GraphRow] = []
        if not (arguments.checks or interpreted):
            for context in arguments.context:
                for batch in arguments.batch:
                    rows += speed(device, mine, context, batch, arguments.repeats)
            steps = graph_speed(device, mine, (8, 32, 128), arguments.repeats)
    except DifferenceError as difference:
        note(f"differs: {difference}")
        return 1
    report["speed"], report["graph_speed"] = [asdict(row) for row in rows], [asdict(row) for row in steps]
    if arguments.json:
        print(json.dumps(report, indent=2))
    elif rows:
        print(table(rows), graph_table(steps), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

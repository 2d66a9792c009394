"""Ways to compute the CPU step, measured side by side: what ADR 9 was decided by.

Attention of one layer of the demo model (9 heads, 3 KV heads, head_dim 64, bfloat16) for eight requests:

- our kernel (Numba), SDPA per request and batched, ``flex_attention`` compiled with a block mask, a C++ operator
  (``decode_attention.cpp``);
- everything but attention of a step of the demo model: eager with packed weights (ours), eager, ``torch.compile``
  with and without freezing.

Each is timed in turn with the others, and three questions are asked of its bits: does a row change with other
neighbours, with a longer neighbour, with the number of rows of its own request (or of the step)? The law needs "no".
With ``--threads 1`` times are those of the thread itself, which other processes lengthen by taking cache and memory
bandwidth only.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vericache_core.attention.numba_kernel import attend_numba
from vericache_core.attention.paged import AttentionJob
from vericache_core.cache.pages import PAGE, PagedRows, pages_for
from vericache_core.kv import LayerDescriptor
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.load import load_model

HEADS, KV_HEADS, HEAD_DIM = 9, 3, 64
SCALING = HEAD_DIM**-0.5
Call = Callable[[], Tensor]


@dataclass(frozen=True)
class Case:
    """Rows to attend: ``query [requests, heads, rows, head_dim]``, KV ``[requests, kv_heads, tokens, head_dim]`` each.

    Row ``i`` of request ``r`` sees the keys below ``lengths[r] - rows + 1 + i``.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    lengths: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.query.shape[2]

    def limits(self) -> Tensor:
        """int64 ``[requests, rows]``: first key that a row no longer sees."""
        return torch.tensor(self.lengths)[:, None] - self.rows + 1 + torch.arange(self.rows)

    def only(self, requests: slice, rows: slice) -> Case:
        """Some requests, and of each some of its last rows."""
        lengths = self.lengths[requests]
        return Case(self.query[requests, :, rows].contiguous(), self.keys[requests], self.values[requests], lengths)


def make_case(requests: int, rows: int, tokens: int, seed: int = 0) -> Case:
    """Random rows and KV in bfloat16."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(torch.bfloat16)

    keys, values = normal(requests, KV_HEADS, tokens, HEAD_DIM), normal(requests, KV_HEADS, tokens, HEAD_DIM)
    return Case(normal(requests, HEADS, rows, HEAD_DIM), keys, values, (tokens,) * requests)


def reference(case: Case) -> Tensor:
    """The same in float64."""
    keys = case.keys.double().repeat_interleave(HEADS // KV_HEADS, 1)
    values = case.values.double().repeat_interleave(HEADS // KV_HEADS, 1)
    scores = case.query.double() @ keys.transpose(2, 3) * SCALING
    hidden = torch.arange(keys.shape[2]) >= case.limits()[:, None, :, None]
    output: Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
    return output


def ours(case: Case) -> Call:
    """Our kernel over pages; it also stores the new rows, which are the last ones of each request."""
    layer = LayerDescriptor(0, "full", HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM, torch.bfloat16, SCALING)
    jobs = []
    for number, length in enumerate(case.lengths):
        pages = PagedRows(layer, torch.device("cpu"))
        pages.reserve(length)
        pages.write(np.zeros(KV_HEADS, np.int64), case.keys[number, :, :length], case.values[number, :, :length])
        base = np.full(KV_HEADS, length - case.rows, np.int64)
        jobs.append(AttentionJob(number * case.rows, case.rows, pages, base, length - case.rows))
    query = case.query.transpose(1, 2).flatten(0, 1).contiguous()

    def new(rows: Tensor) -> Tensor:
        parts = [rows[at, :, length - case.rows : length] for at, length in enumerate(case.lengths)]
        return torch.cat(parts, 1).transpose(0, 1).contiguous()

    keys, values = new(case.keys), new(case.values)
    return lambda: attend_numba(query, keys, values, jobs, SCALING).view(-1, case.rows, HEADS, HEAD_DIM).transpose(1, 2)


def _mask(case: Case, tokens: int) -> Tensor | None:
    """``[requests, 1, rows, tokens]``, bool, true where a row sees a key; ``None`` if all see all."""
    if case.rows == 1 and set(case.lengths) == {tokens}:
        return None
    return (torch.arange(tokens) < case.limits()[:, :, None])[:, None]


def _sdpa(case: Case, tokens: int) -> Call:
    """Heads that share a KV head are rows of one query: with ``enable_gqa`` one row takes five times as long on a CPU."""
    group, keys, values, mask = HEADS // KV_HEADS, case.keys[:, :, :tokens], case.values[:, :, :tokens], _mask(case, tokens)
    query = case.query.view(len(keys), KV_HEADS, group * case.rows, HEAD_DIM)
    if mask is not None:
        mask = mask.repeat(1, 1, group, 1)
    call = functional.scaled_dot_product_attention
    return lambda: call(query, keys, values, attn_mask=mask, scale=SCALING).view(case.query.shape)


def sdpa_batched(case: Case) -> Call:
    """One call, shorter requests masked."""
    return _sdpa(case, max(case.lengths))


def sdpa_each(case: Case) -> Call:
    """A call per request."""
    calls = [_sdpa(case.only(slice(at, at + 1), slice(None)), length) for at, length in enumerate(case.lengths)]
    return lambda: torch.cat([call() for call in calls])


def flex(case: Case) -> Call:
    """Compiled for this case alone; lengths are data."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = max(case.lengths)
    query, keys, values = case.query, case.keys[:, :, :tokens].contiguous(), case.values[:, :, :tokens].contiguous()
    limits = case.limits()

    def seen(request: Tensor, _: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key < limits[request, row]

    mask = create_block_mask(seen, len(case.lengths), None, case.rows, tokens, device="cpu")
    torch._dynamo.reset()  # noqa: SLF001  (each case is compiled anew, or the second one would be with dynamic sizes)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    return lambda: compiled(query, keys, values, block_mask=mask, scale=SCALING, enable_gqa=True)


def operator() -> Callable[[Case], Call]:
    """The C++ operator, compiled now."""
    from torch.utils import cpp_extension

    load: Any = cpp_extension.load
    flags, source = ["-O3", "-march=native", "-ffast-math", "-fopenmp"], str(Path(__file__).parent / "decode_attention.cpp")
    # A folder of its own: in the usual one a run that was killed leaves a lock that the next one waits for.
    with tempfile.TemporaryDirectory() as folder:
        load("decode_attention", [source], flags, extra_ldflags=["-fopenmp"], build_directory=folder, is_python_module=False)
    attend = torch.ops.decode_attention.attend

    def build(case: Case) -> Call:
        room = pages_for(case.keys.shape[2]) * PAGE - case.keys.shape[2]
        keys, values = functional.pad(case.keys, (0, 0, 0, room)), functional.pad(case.values, (0, 0, 0, room))
        blocks = (len(keys), KV_HEADS, -1, PAGE, HEAD_DIM)
        keys, values = keys.view(blocks).transpose(3, 4).contiguous(), values.view(blocks)
        query, lengths = case.query, torch.tensor(case.lengths)
        return lambda: attend(query, keys, values, lengths, SCALING)

    return build


def attention_bits(build: Callable[[Case], Call], requests: int, tokens: int) -> str:
    """Where the bits of a row depend on its company, in words."""
    case = make_case(requests, 9, tokens)
    alone = case.only(slice(0, 1), slice(None))
    shorter = replace(case, lengths=(tokens - 75, *case.lengths[1:]))
    short_alone = shorter.only(slice(0, 1), slice(None))
    wanted, found = build(case)()[0], []
    others = make_case(requests, 9, tokens, seed=1)
    query, keys, values = (torch.cat([a[:1], b[1:]]) for a, b in _parts(case, others))
    mixed = Case(query, keys, values, case.lengths)
    if not torch.equal(build(mixed)()[0], wanted):
        found.append("neighbours")
    if not torch.equal(build(alone)()[0], wanted):
        found.append("number of requests")
    if not torch.equal(build(short_alone)()[0], build(shorter)()[0]):
        found.append("a longer neighbour")
    last = case.only(slice(None), slice(8, 9))
    if not torch.equal(build(last)()[0, :, 0], wanted[:, 8]):
        found.append("rows of the request")
    return ", ".join(found) or "none"


def _parts(a: Case, b: Case) -> list[tuple[Tensor, Tensor]]:
    return [(a.query, b.query), (a.keys, b.keys), (a.values, b.values)]


class _NoAttention:
    """In place of attention: something of the same shape that needs queries, keys and values."""

    def attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        return query + (key + value).repeat_interleave(groups, 1)


def _no_attention(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> tuple[Tensor, None]:
    return (query + (key + value).repeat_interleave(query.shape[1] // key.shape[1], 1)).transpose(1, 2), None


def step_forms(compiler: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Steps of the demo model without attention: ``[rows]`` token ids -> ``[rows, vocab]``, all at one position."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("no-attention", _no_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("no-attention", lambda *_, **__: None)
    adapter = ModelAdapter(load_model("demo", torch.bfloat16)[0], 32)
    model = load_model("demo", torch.bfloat16)[0].eval()
    model.set_attn_implementation("no-attention")

    def packed(ids: Tensor) -> Tensor:
        adapter.shapes = (len(ids),)
        return adapter.step(ids.tolist(), [7] * len(ids), _NoAttention())

    def forward(ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids[None], position_ids=torch.full((1, len(ids)), 7), use_cache=False).logits[0]
        return logits

    forms: dict[str, Callable[[Tensor], Tensor]] = {"eager, weights packed (ours)": packed, "eager": forward}
    if compiler:
        compiled = {
            "torch.compile": torch.compile(forward, fullgraph=True, dynamic=False),
            "torch.compile, freezing": torch.compile(forward, fullgraph=True, dynamic=False, options={"freezing": True}),
        }
        forms |= compiled
    return forms


def step_bits(form: Callable[[Tensor], Tensor], rows: Sequence[int]) -> str:
    """As :func:`attention_bits`, for the rows of a step."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40000, (max(rows),), generator=draw)
    outputs, found = {count: form(ids[:count]).clone() for count in rows}, []
    for count, output in outputs.items():
        turned = form(ids[:count].flip(0)).flip(0)  # other places, and other rows beside each row
        if not torch.equal(turned, output):
            found.append(f"place among {count}")
    if any(not torch.equal(output[: min(rows)], outputs[min(rows)]) for output in outputs.values()):
        found.append("number of rows")
    return ", ".join(found) or "none"


def interleaved(calls: dict[str, Call], repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Milliseconds of each call, one after the other in every repetition; two more to warm up."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 2):
        for name, call in calls.items():
            started = clock()
            call()
            if turn >= 2:
                times[name].append((clock() - started) * 1e3)
    return times


def _figure(times: Sequence[float]) -> str:
    return f"{min(times):.2f} ({statistics.median(times):.2f})"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(header)
    lines = [names, ["---"] * len(names), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measure_attention(args: argparse.Namespace, clock: Callable[[], float], compiler: bool) -> str:
    """Markdown table of the attention of one layer."""
    forms: dict[str, Callable[[Case], Call]] = {
        "Numba kernel (ours)": ours,
        "SDPA, a call a request": sdpa_each,
        "SDPA, batched": sdpa_batched,
    }
    if compiler:
        forms |= {"flex_attention, compiled": flex, "C++ operator": operator()}
    columns, wrong = [], dict.fromkeys(forms, 0.0)
    for rows in args.attention_rows:
        case = make_case(args.requests, rows, args.tokens)
        exact, calls = reference(case), {name: build(case) for name, build in forms.items()}
        for name, call in calls.items():
            wrong[name] = max(wrong[name], float((call().double() - exact).abs().max()))
        columns.append(interleaved(calls, args.repeats, clock))
    cells = [
        [name, *(_figure(times[name]) for times in columns), f"{wrong[name]:.1e}", attention_bits(build, 3, args.tokens)]
        for name, build in forms.items()
    ]
    header = [f"{args.requests} x {rows}, ms" for rows in args.attention_rows]
    return _table(["attention of a layer", *header, "largest error", "a row's bits change with"], cells)


def measure_steps(args: argparse.Namespace, clock: Callable[[], float], compiler: bool) -> str:
    """Markdown table of steps without attention."""
    forms = step_forms(compiler)
    ids = torch.randint(0, 40000, (max(args.step_rows),), generator=torch.Generator().manual_seed(0))
    columns = []
    for rows in args.step_rows:
        calls: dict[str, Call] = {name: partial(form, ids[:rows]) for name, form in forms.items()}
        columns.append(interleaved(calls, args.repeats, clock))
    cells = [
        [name, *(_figure(times[name]) for times in columns), step_bits(form, args.step_rows)] for name, form in forms.items()
    ]
    header = [f"{rows} rows, ms" for rows in args.step_rows]
    return _table(["step without attention", *header, "a row's bits change with"], cells)


@torch.no_grad()
def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=7000)
    parser.add_argument("--attention-rows", type=int, nargs="+", default=[1, 9])
    parser.add_argument("--step-rows", type=int, nargs="+", default=[8, 32, 72])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=("attention", "steps"))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    numba.set_num_threads(args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    compiler = shutil.which("g++") is not None
    if not compiler:
        print("No g++ here: flex_attention, torch.compile and the C++ operator need one and are left out.\n")
    if args.only != "steps":
        print(measure_attention(args, clock, compiler) + "\n", flush=True)
    if args.only != "attention":
        print(measure_steps(args, clock, compiler) + "\n", flush=True)
    kind = "processor time of the thread" if args.threads == 1 else "wall time"
    print(
        f"Milliseconds, {kind}, least (median) of {args.repeats} in turn; {args.threads} thread(s), torch {torch.__version__}."
    )


if __name__ == "__main__":
    main()

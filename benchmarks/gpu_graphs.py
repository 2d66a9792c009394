"""Steps as CUDA graphs: engines with and without them compared bit for bit, and what the graphs save."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from gpu_engines import same_answer, small_model
from gpu_parts import Shape, measure, note, require
from torch import Tensor

from vericache_core import Engine, EngineConfig, SamplingParams
from vericache_core.model.adapter import ModelAdapter
from vericache_core.model.graphs import capture_steps


@dataclass(frozen=True)
class GraphRow:
    """A step of ``rows`` rows without its attention, launched one by one and as graphs: medians."""

    rows: int
    seconds: float
    graph_seconds: float
    times: float


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
        same = all(same_answer(mine, theirs) for mine, theirs in zip(*outputs, strict=True))
        records.append({"dtype": str(dtype).removeprefix("torch."), "captured": shapes, "refused": refused, "identical": same})
        note(json.dumps(records[-1]))
        require(same, f"engines with CUDA graphs, {dtype}")
        require(bool(shapes), f"nothing was captured: {refused}")
    return records


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

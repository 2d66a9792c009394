"""Which of the six ways from a prefix to its answer is fastest, by the paper's equation 4 and what was measured here.

``T_req = c KV / BW_l + K / (E(x) + 1) T_cycle`` with ``T_cycle = max(x T_draft, KV / BW_h) + T_verify(x) + latency``:
the compressed prefix crosses the slow link, then K tokens come in cycles of x drafts, of which E(x) are accepted. The
verifier is taken to compute as fast as this side. All requests of a batch share one prefix and the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from vericache_core.runtime.costs import Block, CostModel, StepLoad
from vericache_core.runtime.hazard import accepted_at
from vericache_core.runtime.rounds import WINDOWS

Path = Literal["local", "remote", "verify", "verify-stateless", "stream", "stream-stateless", "fetch"]
PATHS: Final[tuple[Path, ...]] = get_args(Path)


@dataclass(frozen=True)
class Task:
    """A batch of requests over one prefix.

    Attributes:
        requests: that share the prefix and the steps.
        prefix, new_tokens: tokens of the prefix, and to generate for each request.
        full_bytes, kept: full KV of the prefix, and the fraction of it that the compressed KV has.
        hazard: chance per draft to be wrong.
        latency, bandwidth: of the link, in seconds for a round trip and bytes per second.
        reload: bytes per second of the store's slower tier, from which stateless verifies read.
        here: the compressed prefix has come already.
    """

    requests: int
    prefix: int
    new_tokens: int
    full_bytes: float
    kept: float
    hazard: float
    latency: float
    bandwidth: float
    reload: float = float("inf")
    here: bool = False


def plain_seconds(costs: CostModel, task: Task) -> float:
    """One plain token of every request."""
    return costs.compute_seconds(StepLoad(task.requests, (Block(task.requests * task.full_bytes),)))


def prefill_seconds(costs: CostModel, task: Task) -> float:
    """The prefix computed here, in the largest steps there are."""
    rows = max(costs.shapes)
    steps = -(-task.prefix // rows)
    pairs = task.prefix * task.prefix / 2
    return steps * costs.rows_seconds(rows) + costs.attention_seconds(task.full_bytes * steps / 2, pairs)


def cycle_seconds(costs: CostModel, task: Task, window: int, *, stateless: bool) -> float:
    """One cycle of every request: ``window`` drafts here, one verify there."""
    draft = costs.compute_seconds(StepLoad(task.requests, (Block(task.requests * task.full_bytes * task.kept),)))
    rows, block = window + 1, Block(task.full_bytes, float((window + 1) * task.prefix))
    verify = costs.compute_seconds(StepLoad(task.requests * rows, (block,) * task.requests))
    reload = task.requests * task.full_bytes / task.reload if stateless else 0.0
    return max(window * draft, reload) + verify + task.latency


def best_window(costs: CostModel, task: Task, *, stateless: bool = False) -> int:
    """The window that commits most tokens per second; at least 1."""

    def rate(window: int) -> float:
        return (accepted_at(task.hazard, window) + 1) / cycle_seconds(costs, task, window, stateless=stateless)

    best: int = max((window for window in WINDOWS if window), key=rate)
    return best


def path_seconds(costs: CostModel, task: Task, path: Path) -> float:
    """Seconds until all requests of ``task`` are done on ``path``."""
    plain = plain_seconds(costs, task)
    full_transfer = task.full_bytes / task.bandwidth
    if path == "local":
        return prefill_seconds(costs, task) + task.new_tokens * plain
    if path == "remote":
        return task.latency + task.new_tokens * plain
    if path == "fetch":
        return task.latency + full_transfer + task.new_tokens * plain
    stateless = path.endswith("stateless")
    window = best_window(costs, task, stateless=stateless)
    per_token = cycle_seconds(costs, task, window, stateless=stateless) / (accepted_at(task.hazard, window) + 1)
    start = task.latency + (0.0 if task.here else task.kept * full_transfer)
    if path.startswith("verify"):
        return start + task.new_tokens * per_token
    # The rest of the full KV streams while drafts are verified; afterwards tokens are plain. Codes hold no exact rows,
    # so of a quantized prefix everything has to come: counted for all, for the map of exact rows is not known here.
    drafted = min(task.new_tokens, full_transfer / per_token)
    return start + drafted * per_token + (task.new_tokens - drafted) * plain


def choose_path(costs: CostModel, task: Task, allowed: Sequence[Path] = PATHS) -> Path:
    """The fastest of the allowed paths; of equals the one that is named first."""
    return min(allowed, key=lambda path: path_seconds(costs, task, path))

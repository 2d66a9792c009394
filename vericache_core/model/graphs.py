"""Steps as captured graphs, cut at the attention calls: one launch for what lies between two of them.

Between two attention calls a step of one shape launches the same kernels on buffers of the same shapes every time, and on a
GPU launching them takes longer than running them. So the model's forward runs once per shape while the device records, the
recording is cut wherever the model attends, and from then on a step replays the pieces and attends in between. Attention
itself is not captured: how many requests it serves, and of which lengths, changes from step to step.

A replay launches the kernels that were recorded, so it must have the bits of the forward itself. That is not
assumed: every shape is compared on random steps when it is captured, and one difference, or a forward that cannot be captured,
leaves all steps as they were. Forward and replay may therefore be mixed freely.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from vericache_core.model.interface import StepAttention, active_step

if TYPE_CHECKING:
    from vericache_core.model.adapter import ModelAdapter

log = logging.getLogger("vericache.model")
MOST_POSITION = 1000
"""Positions of the random steps that are compared lie below it."""


class Recorder(Protocol):
    """Records what the calling thread launches on the device."""

    def session(self) -> AbstractContextManager[None]:
        """Surrounds everything that is recorded for one shape; a recording that is open at its end is dropped."""

    def begin(self) -> None:
        """Record from here on."""

    def end(self) -> Callable[[], None]:
        """Stop; the result launches what was recorded again, on the same memory, on the caller's stream."""


class CudaRecorder:
    """CUDA graphs in a memory pool of their own.

    Recordings share the pool, so they must be replayed in the order in which they were made, one shape at a time. Capture
    is local to the thread: what other threads launch or allocate meanwhile (swaps, other engines) is neither
    recorded nor an error.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graph: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # what broke the recording is the error to tell, not that it is broken
                    self.end()  # else the stream would go on recording
                raise
        torch.cuda.synchronize(self._device)

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Callable[[], None]:
        self._graph.capture_end()
        replay: Callable[[], None] = self._graph.replay
        return replay


def recorder_for(device: torch.device) -> Recorder | None:
    """What records on ``device``; None where nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


@dataclass(frozen=True, slots=True)
class _Piece:
    """What runs up to an attention call, and that call: its arguments and the buffer for its answer stay where they are."""

    replay: Callable[[], None]
    module: nn.Module
    asked: tuple[Tensor, Tensor, Tensor]
    facts: dict[str, Any]
    answer: Tensor


class StepGraph:
    """The forward of one shape as pieces.

    Args:
        forward: ``(ids, positions, mask)``, each ``[1, rows]``, -> logits ``[rows, vocab]``; calls the active step.
        rows: of the shape.
        device: of the model.
        recorder: records the pieces.
    """

    def __init__(
        self, forward: Callable[[Tensor, Tensor, Tensor], Tensor], rows: int, device: torch.device, recorder: Recorder
    ) -> None:
        self._recorder, self._pieces = recorder, list[_Piece]()
        self._ids, self._positions = (torch.zeros((1, rows), dtype=torch.int64, device=device) for _ in range(2))
        # All ones and never read. Without a mask transformers would look for packed sequences in the positions, and
        # decide by what it finds there: on the CPU, which is not possible while the device records.
        self._mask = torch.ones((1, rows), dtype=torch.bool, device=device)
        with recorder.session():
            with active_step(_Zeros()):
                forward(self._ids, self._positions, self._mask)  # what is set up at the first use must not be recorded
            recorder.begin()
            with active_step(self):
                self._logits = forward(self._ids, self._positions, self._mask)
            self._last = recorder.end()

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        """Cut: end the piece that leads here, and begin the next one with a buffer for the answer."""
        replay = self._recorder.end()
        answer = _Zeros().attend(module, query, key, value, facts)
        self._pieces.append(_Piece(replay, module, (query, key, value), facts, answer))
        self._recorder.begin()
        return answer

    def run(self, ids: Sequence[int], positions: Sequence[int], attention: StepAttention, logits: bool) -> Tensor:
        """One step; see :meth:`vericache_core.model.adapter.ModelAdapter.step`.

        Queries, keys and values that ``attention`` sees are overwritten by the next step. Without ``logits`` the last piece
        does not run, and what is returned is NaN.
        """
        self._ids.copy_(torch.tensor([ids]))
        self._positions.copy_(torch.tensor([positions]))
        for piece in self._pieces:
            piece.replay()
            piece.answer.copy_(attention.attend(piece.module, *piece.asked, piece.facts))
        if not logits:
            return self._logits.new_full((1, self._logits.shape[1]), torch.nan)
        self._last()
        return self._logits.clone()


class StepGraphs:
    """A graph for each shape of an adapter. Build it with :func:`capture_steps`."""

    def __init__(self, adapter: ModelAdapter, recorder: Recorder) -> None:
        # Graphs know addresses only: weights that somebody replaces in the model must stay where they are.
        model = adapter.model
        self._weights = [part.detach() for part in itertools.chain(model.parameters(), model.buffers())]
        self._busy = threading.Lock()
        self._graphs: dict[int, StepGraph] = {}
        for rows in adapter.shapes:
            with torch.inference_mode():
                self._graphs[rows] = StepGraph(adapter.forward, rows, adapter.device, recorder)

    @property
    def shapes(self) -> tuple[int, ...]:
        """Row counts that are captured."""
        return tuple(self._graphs)

    def run(self, ids: Sequence[int], positions: Sequence[int], attention: StepAttention, logits: bool) -> Tensor | None:
        """A step of ``len(ids)`` rows; None for another shape, and while a step of another thread has the buffers."""
        graph = self._graphs.get(len(ids))
        if graph is None or not self._busy.acquire(blocking=False):
            return None
        try:
            return graph.run(ids, positions, attention, logits)
        finally:
            self._busy.release()


def capture_steps(adapter: ModelAdapter, mode: str) -> None:
    """Let ``adapter`` run steps as graphs, if the device has them and they give the same bits.

    Sets ``adapter.graphs``, or ``adapter.graphs_refused`` to the reason why it could not be.

    Args:
        adapter: its ``shapes`` are settled.
        mode: ``"auto"`` or ``"never"``.
    """
    recorder = None if mode == "never" else recorder_for(adapter.device)
    if recorder is None:
        return
    try:
        graphs = StepGraphs(adapter, recorder)
        refused = next(
            (f"other bits in a step of {rows} rows" for rows in graphs.shapes if not _same_bits(adapter, graphs, rows)), None
        )
    except Exception as error:  # noqa: BLE001  (whatever a model does while it is recorded: its steps run without graphs)
        refused = f"{type(error).__name__}: {error}"
    if refused is None:
        adapter.graphs = graphs
    else:
        adapter.graphs_refused = refused
        log.warning("steps run without CUDA graphs, slower: %s", refused)


def _same_bits(adapter: ModelAdapter, graphs: StepGraphs, rows: int) -> bool:
    """Whether random steps have the same bits with the graph: logits, and all that attention is asked."""
    positions_end = min(MOST_POSITION, adapter.max_positions or MOST_POSITION)
    for seed in range(2):  # the second one finds the buffers full of the first
        draw = torch.Generator().manual_seed(seed)
        ids, positions = (torch.randint(0, end, (rows,), generator=draw) for end in (adapter.vocab_size, positions_end))
        one, other = _Random(seed), _Random(seed)
        expected = adapter.step(ids.tolist(), positions.tolist(), one)  # ``adapter.graphs`` is not set yet
        with torch.inference_mode():
            found = graphs.run(ids.tolist(), positions.tolist(), other, True)
        assert found is not None  # nobody else knows the graphs yet
        pairs = zip((expected, *one.asked), (found, *other.asked), strict=True)
        if not all(torch.equal(mine, theirs) for mine, theirs in pairs):
            return False
    return True


class _Zeros:
    """Attention that answers zeros."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        return query.new_zeros((*query.shape[:2], value.shape[2]))


class _Random:
    """Attention that answers random rows, the same for the same ``seed``, and keeps copies of what it was asked."""

    def __init__(self, seed: int) -> None:
        self.asked: list[Tensor] = []
        self._draw = torch.Generator().manual_seed(seed)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, facts: dict[str, Any]) -> Tensor:
        self.asked += [part.clone() for part in (query, key, value)]
        return torch.randn((*query.shape[:2], value.shape[2]), generator=self._draw).to(query)

"""A recorder for tests without a GPU: what CUDA graphs promise, and what they refuse, at the level of torch's operations.

Like a graph a tape knows operations, tensors at fixed places and numbers as they were when it was recorded; no Python runs at
replay. It refuses what makes the CPU wait for the device or copies from memory of the CPU. Before a step is replayed
everything that a recorded operation ever wrote is overwritten, so that whoever still reads results of the step before reads
garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

REFUSED_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operations in order."""

    def __init__(self, on_replay: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.on_replay = on_replay
        self.operations: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: list[Tensor] = []
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "lift_fresh" in str(func) or REFUSED_TAGS & set(func.tags):
            raise RuntimeError(f"{func} is not permitted when the stream is capturing")
        result = func(*args, **kwargs)
        results = tensors(result)
        if not results:
            raise RuntimeError(f"{func} makes the CPU wait, which is not permitted when the stream is capturing")
        given = {place(part) for part in tensors((args, kwargs))}
        self.read |= given
        fresh = [part for part in results if place(part) not in given]
        self.operations.append((func, args, kwargs, fresh))
        self.made += fresh
        return result

    def replay(self) -> None:
        self.on_replay()
        for func, args, kwargs, fresh in self.operations:
            result = func(*args, **kwargs)
            if fresh:
                for old, new in zip(fresh, tensors(result), strict=True):
                    old.copy_(new)


class TapeRecorder:
    """See :class:`vericache_core.model.graphs.Recorder`.

    Attributes:
        steps: steps that were replayed.
        sessions: the tapes of each session.
    """

    def __init__(self) -> None:
        self.sessions: list[list[Tape]] = []
        self.steps = 0
        self.open = False

    @contextmanager
    def session(self) -> Iterator[None]:
        self.sessions.append([])
        try:
            yield
        except BaseException:
            if self.open:
                self.end()
            raise

    def begin(self) -> None:
        tapes = self.sessions[-1]
        tapes.append(Tape((lambda: self._poison(tapes)) if not tapes else lambda: None))
        tapes[-1].__enter__()  # type: ignore[no-untyped-call]
        self.open = True

    def end(self) -> Callable[[], None]:
        self.open = False
        tape = self.sessions[-1][-1]
        tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return tape.replay

    def _poison(self, tapes: list[Tape]) -> None:
        self.steps += 1
        for part in (part for tape in tapes for part in tape.made):
            part.fill_(torch.nan if part.is_floating_point() else part.dtype is torch.bool or torch.iinfo(part.dtype).max)

    def outside(self) -> set[int]:
        """Places that recordings read and did not make."""
        tapes = [tape for tapes in self.sessions for tape in tapes]
        return {at for tape in tapes for at in tape.read} - {place(part) for tape in tapes for part in tape.made}


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def place(tensor: Tensor) -> int:
    """Address of the memory behind a tensor, whatever part of it the tensor shows."""
    return tensor.untyped_storage().data_ptr()

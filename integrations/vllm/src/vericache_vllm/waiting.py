"""How the processes of a tensor-parallel engine on the CPU wait for each other."""

from __future__ import annotations

from typing import Any

from vericache_vllm.compat import HOOKS, difference


def wait_passively() -> bool:
    """Let ranks on the CPU sleep until the next message; returns whether vLLM is one whose way of waiting is known.

    vLLM's ranks spin for a second after each message before they sleep. While LMCache looks something up, the scheduler sends
    a step without tokens every millisecond, so no rank ever stops; bound to a core each, the ranks then keep the cores from
    LMCache's server and from the threads that the answer has to pass through, and the lookup may time out.

    A reader that never notes when it read takes its last message for old, and sleeps in ``poll`` as every idle one does.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or any(difference(hook) for hook in HOOKS["waiting"]):
        return False
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.record_read = _note_nothing
    return True


def _note_nothing(condition: Any) -> None:
    """In place of ``SpinCondition.record_read``."""

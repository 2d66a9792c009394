"""A progress bar on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int, int, int], None]
"""``(prompt rows done, prompt rows in all, new tokens, most new tokens)``."""


@contextmanager
def bar(title: str) -> Iterator[Progress | None]:
    """Yield what to call after each step, or ``None`` when standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from tqdm import tqdm

    with tqdm(total=1, desc=title, leave=False, unit="tok", file=sys.stderr) as shown:

        def update(prompt_done: int, prompt: int, new: int, most: int) -> None:
            phase, done, total = ("prefill", prompt_done, prompt) if prompt_done < prompt else ("decode", new, most)
            if shown.total != total:
                shown.reset(total)
            shown.set_description_str(f"{title}: {phase}", refresh=False)
            shown.update(done - shown.n)

        yield update

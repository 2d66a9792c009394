"""One call over HTTP while it is worked on: its requests, their pieces, and whether anybody still waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request

from vericache_core.outputs import RequestOutput
from vericache_core.serve.answers import StoppingError
from vericache_core.serve.asks import Ask
from vericache_core.serve.runner import Piece, Runner

log = logging.getLogger("vericache.serve")

POLL: Final = 0.5
"""Seconds between two looks at whether the caller is still there."""


class CallerGoneError(Exception):
    """Whoever called has hung up."""


class Call:
    """Requests of one call, one for each choice, and what comes of them."""

    def __init__(self, runner: Runner, ask: Ask, tenant: str, request: Request, name: str) -> None:
        self._runner, self.ask, self._tenant, self._request, self._name = runner, ask, tenant, request, name
        self._queue: asyncio.Queue[tuple[int, Piece]] = asyncio.Queue()
        self._numbers: list[int] = []
        self._outputs: dict[int, RequestOutput] = {}
        self._early: list[tuple[int, Piece]] = []
        self._started = self._looked = time.monotonic()

    async def begin(self) -> None:
        """Hand all requests in; returns when each was taken in.

        Raises:
            VeriCacheError: one was not; :meth:`end` cancels the others.
            CallerGoneError: nobody waits any more.
        """
        loop, ask = asyncio.get_running_loop(), self.ask
        for index, (prompt, params) in enumerate(ask.requests()):

            def deliver(piece: Piece, index: int = index) -> None:
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

            self._numbers.append(
                self._runner.submit(prompt, params, deliver, plain=ask.plain, priority=ask.priority, tenant=self._tenant)
            )
        begun: set[int] = set()
        while len(begun) < len(self._numbers):
            index, piece = await self._next()
            if index in begun:
                self._early.append((index, piece))
            begun.add(index)

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """Pieces of the choices by their positions, until all have had their last.

        Raises:
            VeriCacheError: one failed.
        """
        while len(self._outputs) < len(self._numbers):
            index, piece = self._early.pop(0) if self._early else await self._next()
            if piece.output is not None:
                self._outputs[index] = piece.output
            yield index, piece

    async def _next(self) -> tuple[int, Piece]:
        while True:
            if time.monotonic() - self._looked >= POLL:
                if await self._request.is_disconnected():
                    raise CallerGoneError
                self._looked = time.monotonic()
            with contextlib.suppress(asyncio.TimeoutError):
                index, piece = await asyncio.wait_for(self._queue.get(), POLL)
                break
        error = piece.error
        if piece.output is not None and piece.output.finish_reason == "error":
            error = piece.output.error
        if piece.output is not None and piece.output.finish_reason == "cancelled":
            error = StoppingError("the answer was given up", cause="the server is stopping")
        if error is not None:
            raise error
        return index, piece

    def outputs(self) -> list[RequestOutput]:
        """Whole outputs in the order of the choices, after :meth:`pieces`."""
        return [self._outputs[index] for index in range(len(self._numbers))]

    def end(self) -> None:
        """Cancel what still runs, and log what came of it."""
        for number in self._numbers:
            self._runner.cancel(number)
        done = self._outputs.values()
        facts = {
            "request": self._name,
            "prompts": len(self.ask.prompts),
            "choices": len(self.ask.prompts) * self.ask.n,
            "answered": len(done),
            "prompt_tokens": sum(len(output.prompt_token_ids) for output in done),
            "new_tokens": sum(len(output.token_ids) for output in done),
            "seconds": round(time.monotonic() - self._started, 3),
        }
        log.info("answered" if len(done) == len(self.ask.prompts) * self.ask.n else "given up", extra=facts)

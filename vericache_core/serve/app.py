"""The HTTP side: ``/v1/models``, ``/v1/completions``, ``/v1/chat/completions`` and ``/healthz``, over a `Runner`."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from vericache_core.engine import Engine
from vericache_core.errors import UsageError, VeriCacheError
from vericache_core.model.prompts import ending_ids
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.serve.answers import (
    ChoiceStream,
    NotJsonError,
    StoppingError,
    TooLargeError,
    UnauthorizedError,
    Writer,
    error_body,
    status_of,
)
from vericache_core.serve.asks import read_ask
from vericache_core.serve.call import Call, CallerGoneError
from vericache_core.serve.dialect import dialect_of
from vericache_core.serve.grammar import Grammars
from vericache_core.serve.logprobs import TokenTexts
from vericache_core.serve.runner import Runner
from vericache_core.serve.tool_calls import OnlyContent
from vericache_core.service.access import SCHEME, tenant_of

log = logging.getLogger("vericache.serve")

MOST_BYTES: Final = 64 << 20
"""Of a body."""
GONE: Final = 499
"""Status of an answer that nobody reads any more, as web servers log it."""


class Server:
    """Answers calls by what ``runner`` decodes.

    Args:
        runner: started by the caller.
        model: the name that is served.
        defaults: sampling parameters of what a call leaves out.
        compressor: that drafts, for calls that name one.
        tokens: tenants and hashes of their tokens, as `read_tokens` gives; None lets everybody in.
        stopping: new calls are refused once it is set.
        engine: that the runner runs; looked at, not run.

    Attributes:
        app: to be run by an ASGI server.
    """

    def __init__(
        self,
        runner: Runner,
        model: str,
        defaults: SamplingParams,
        compressor: str | None,
        tokens: Mapping[str, bytes] | None,
        stopping: threading.Event,
        engine: Engine,
    ) -> None:
        self._runner, self._model, self._defaults, self._compressor, self._tokens = runner, model, defaults, compressor, tokens
        self._created = int(time.time())
        self._stopping, tokenizer = stopping, engine.tokenizer
        self._dialect, self._texts = dialect_of(tokenizer), TokenTexts(tokenizer)
        self._grammars = Grammars(tokenizer, engine.adapter.vocab_size, ending_ids(engine.adapter.model, tokenizer))
        routes = [
            Route("/healthz", self._health),
            Route("/v1/models", self._models),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes, exception_handlers={VeriCacheError: _refused})  # type: ignore[dict-item]

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("draining" if self._stopping.is_set() else "ready")

    async def _models(self, request: Request) -> Response:
        self._tenant(request)
        model = {"id": self._model, "object": "model", "created": self._created, "owned_by": "vericache"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _complete(self, request: Request) -> Response:
        return await self._answer(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        tenant = self._tenant(request)
        if self._stopping.is_set():
            raise StoppingError("the server is stopping", hint="send it again, to another one")
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=GONE)
        ask = read_ask(
            body,
            chat=chat,
            model=self._model,
            defaults=self._defaults,
            compressor=self._compressor,
            dialect=self._dialect,
            grammars=self._grammars,
        )
        writer = Writer(chat, self._model, self._texts, ask.reader or OnlyContent, ask.n)
        call, handed_on = Call(self._runner, ask, tenant, request, writer.id), False
        try:
            await call.begin()  # what cannot run at all is told by the status, of a stream too
            if ask.stream:
                handed_on = True
                headers = {"cache-control": "no-cache", "x-request-id": writer.id}
                return StreamingResponse(_stream(call, writer), media_type="text/event-stream", headers=headers)
            async for _ in call.pieces():
                pass
            answer = writer.whole(call.outputs())
        except CallerGoneError:
            return Response(status_code=GONE)
        finally:
            if not handed_on:
                call.end()
        return JSONResponse(answer, headers={"x-request-id": writer.id})

    def _tenant(self, request: Request) -> str:
        """Who calls, by the token."""
        if self._tokens is None:
            return ""
        shown = request.headers.get("authorization", "")
        tenant = tenant_of(shown[len(SCHEME) :], self._tokens) if shown.startswith(SCHEME) else None
        if tenant is None:
            raise UnauthorizedError("no known token", hint="send the header Authorization: Bearer TOKEN")
        return tenant


async def _stream(call: Call, writer: Writer) -> AsyncIterator[str]:
    """Server-sent events: pieces as they come, what failed as an error, ``[DONE]`` behind the last."""
    try:
        choices: dict[int, ChoiceStream] = {}
        async for index, piece in call.pieces():
            chunks = []
            if index not in choices:
                choices[index] = writer.choice(index)
                chunks += choices[index].begin()
            chunks += choices[index].more(piece.text, piece.logprobs)
            if piece.output is not None:
                chunks += choices[index].end(piece.output)
            for chunk in chunks:
                yield _event(chunk)
        if call.ask.usage:
            yield _event(writer.usage(call.outputs()))
        yield "data: [DONE]\n\n"
    except VeriCacheError as error:
        yield _event(error_body(error))
    except CallerGoneError:
        log.debug("a caller has gone", extra={"request": writer.id})
    finally:
        call.end()


def _event(content: Any) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _body(request: Request) -> Any:
    """Parsed JSON of a call.

    A page in a browser can make its reader send text anywhere, but not JSON without asking first: so JSON it must be.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise NotJsonError(f"content type {kind or 'none'!r}", hint="send application/json")
    read = bytearray()
    async for chunk in request.stream():
        read += chunk
        if len(read) > MOST_BYTES:
            raise TooLargeError(f"a body of more than {MOST_BYTES} bytes")
    try:
        return json.loads(read)
    except (ValueError, RecursionError) as error:
        raise UsageError("the body is not JSON", cause=str(error)) from None


async def _refused(_request: Request, error: VeriCacheError) -> Response:
    status = status_of(error)
    headers = {429: {"retry-after": "1"}, 503: {"retry-after": "5"}, 401: {"www-authenticate": "Bearer"}}.get(status)
    if status == 500:
        log.error("a call failed", extra={"cause": str(error)})
    return JSONResponse(error_body(error), status, headers=headers)

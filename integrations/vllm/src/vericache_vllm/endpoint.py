"""A route on vLLM's HTTP server that verifies drafts (``vllm.endpoint_plugins``).

vLLM's own routes cannot: their schema hides that a request with prompt log-probabilities may read a cache, which is what
a verification is about. The server has to be started with ``VLLM_PLUGINS`` naming ``vericache`` (that also keeps our
general plugin) and ``VERICACHE_TOKEN`` set; without a token it does not start.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import uuid
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vericache_core.errors import ConfigError, RemoteError
from vericache_core.service.access import SHORTEST
from vericache_vllm.compat import require_compatible
from vericache_vllm.offline import covered, verdict_of, verification_params
from vericache_vllm.verdict import MOST_BYTES, PATH, PROTOCOL, Check, Verdict

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm import RequestOutput
    from vllm.engine.protocol import EngineClient

MOST_CHECKS = 256
TokenId = Annotated[int, Field(strict=True, ge=0)]


class WireCheck(BaseModel):
    """One verification as it comes in."""

    model_config = ConfigDict(extra="forbid")
    verified: list[TokenId] = Field(min_length=1)
    drafts: list[TokenId] = []


class WireChecks(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")
    protocol: int
    checks: list[WireCheck] = Field(max_length=MOST_CHECKS)
    salt: str | None = None


async def describe(raw: Request, authorization: Annotated[str | None, Header()] = None) -> dict[str, Any]:
    """What a client has to know before it sends anything."""
    state = _admitted(raw, authorization)
    return {"protocol": PROTOCOL, "max_model_len": state.max_model_len, "vocab_size": state.vocab_size, "model": state.model}


async def verify(raw: Request, authorization: Annotated[str | None, Header()] = None) -> dict[str, Any]:
    """Verdicts in the order of the checks.

    The body is no parameter: FastAPI would read all of it, from anybody, before a line of ours.
    """
    state = _admitted(raw, authorization)
    body = _checks_of(await _read(raw))
    checks = [Check(tuple(check.verified), tuple(check.drafts)) for check in body.checks]
    for check in checks:
        length = len(check.verified) + len(check.drafts)
        if length >= state.max_model_len:
            raise HTTPException(400, f"{length} tokens leave no room for one more in {state.max_model_len}")
        if max((*check.verified, *check.drafts)) >= state.vocab_size:
            raise HTTPException(400, f"a token id is outside the vocabulary of {state.vocab_size}")
    try:
        verdicts = await asyncio.gather(*(state.decide(check, body.salt) for check in checks))
    except RemoteError as error:
        raise HTTPException(502, str(error)) from error
    return {"protocol": PROTOCOL, "verdicts": [_wire(verdict) for verdict in verdicts]}


async def _read(raw: Request) -> bytes:
    """The body, if it is not too long."""
    parts, size = [], 0
    async for part in raw.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise HTTPException(413, f"a message has at most {MOST_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _checks_of(raw: bytes) -> WireChecks:
    """What a body asks for; another protocol is refused as that, whatever its fields are."""
    try:
        found = json.loads(raw)
        if isinstance(found, dict) and found.get("protocol") != PROTOCOL:
            raise HTTPException(400, f"this server speaks protocol {PROTOCOL}, not {found.get('protocol')!r:.20}")
        return WireChecks.model_validate(found)
    except (ValueError, RecursionError) as error:  # of pydantic, too
        cause = str(error.errors(include_input=False)) if isinstance(error, ValidationError) else str(error)
        raise HTTPException(422, f"the message makes no sense: {cause[:500]}") from error


def _wire(verdict: Verdict) -> dict[str, Any]:
    return {
        "accepted": verdict.accepted,
        "token": verdict.token,
        "margins": list(verdict.margins),
        "cached": verdict.cached,
        "reruns": verdict.reruns,
    }


def _admitted(raw: Request, authorization: str | None) -> _State:
    """The state, for those who hold the token. vLLM's ``--api-key`` guards its own routes only."""
    state: _State = raw.app.state.vericache
    if not hmac.compare_digest((authorization or "").encode(), f"Bearer {state.token}".encode()):
        raise HTTPException(401, "a valid token is needed")
    return state


class _State:
    """What the routes share."""

    def __init__(self, engine: EngineClient, token: str) -> None:
        self.engine, self.token = engine, token
        config = engine.model_config
        self.max_model_len, self.vocab_size = int(config.max_model_len), int(config.get_vocab_size())
        self.model = str(config.model)

    async def decide(self, check: Check, salt: str | None) -> Verdict:
        output = await self._run(check, salt, use_cache=True)
        if not covered(check, output):
            return verdict_of(check, output)
        return verdict_of(check, await self._run(check, salt, use_cache=False), reruns=1)

    async def _run(self, check: Check, salt: str | None, *, use_cache: bool) -> RequestOutput:
        prompt: Any = {"prompt_token_ids": [*check.verified, *check.drafts]}
        if salt is not None:
            prompt["cache_salt"] = salt
        last: RequestOutput | None = None
        number = f"vericache-{uuid.uuid4()}"
        async for output in self.engine.generate(prompt, verification_params(check, use_cache=use_cache), number):
            last = output
        if last is None:
            raise RemoteError("vLLM ended a verification without an answer")
        return last


class VeriCacheEndpoint:
    """What vLLM instantiates."""

    name = "vericache"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        require_compatible("endpoint")
        router = APIRouter()
        router.add_api_route(PATH, describe, methods=["GET"])
        router.add_api_route(PATH, verify, methods=["POST"])
        app.include_router(router)

    async def init_state(self, engine_client: EngineClient | None, state: Any, args: Namespace) -> None:
        token = os.environ.get("VERICACHE_TOKEN", "")
        if len(token) < SHORTEST:
            raise ConfigError(
                f"the verify route has a token of {len(token)} characters",
                hint=f"set VERICACHE_TOKEN to a random text of at least {SHORTEST}: openssl rand -hex 32",
            )
        if engine_client is None:
            raise ConfigError("the verify route needs an engine, and this server has none")
        state.vericache = _State(engine_client, token)

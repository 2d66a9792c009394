"""Messages that come twice, in another order, or not at all: noticed or harmless, and never a wrong token."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fault_table import Tally
from tests.models import prompt
from tests.remote.stores import PREFIX, TOKEN, drafter, plain, prompts, same, store, store_engine, token_file
from vericache_core.errors import RemoteError, RemoteRefused
from vericache_core.kv import LayerDescriptor
from vericache_core.remote import layers
from vericache_core.remote.auth import Guard
from vericache_core.remote.frames import Message, decode, ids_to_bytes
from vericache_core.remote.layers import Assembly, Blob, parts
from vericache_core.remote.limits import Limits
from vericache_core.remote.link import Link
from vericache_core.remote.server import StoreServer
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.access import read_tokens

PARAMS = SamplingParams(max_new_tokens=16)


# -- parts of a prefix -------------------------------------------------------------------------------


def assembled(described: Sequence[LayerDescriptor], messages: Sequence[Message]) -> list[Blob]:
    """What comes out of parts in this order."""
    assembly = Assembly(described, 150, [0, 1, 2])
    found = []
    for message in messages:
        if message.kind == "end":
            break
        done = assembly.take(message)
        if done is not None:
            found.append(done[1])
    assembly.finish()
    return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        pytest.param("swapped", 45, marks=pytest.mark.fault("reordered", "every pair of parts of a prefix")),
        pytest.param("doubled", 65, marks=pytest.mark.fault("doubled", "every part of a prefix at every later place")),
        pytest.param("missing", 10, marks=pytest.mark.fault("closed", "any part of a prefix missing")),
    ],
)
def test_parts_in_any_other_order_twice_or_missing(
    kind: str, expected: int, tally: Tally, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "CHUNK", 100)
    draw = random.Random(2)
    blobs = [Blob("exact", 0, draw.randbytes(size)) for size in (430, 100, 399)]
    whole = list(parts(enumerate(blobs)))
    with store_engine() as engine:
        described = engine.adapter.layers
    assert assembled(described, whole) == blobs
    count = len(whole) - 1  # behind them the end
    spoiled: list[list[Message]] = []
    if kind == "swapped":
        for one, other in itertools.combinations(range(count), 2):
            swapped = list(whole)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            spoiled.append(swapped)
    for one in range(count):
        if kind == "missing":
            spoiled.append(whole[:one] + whole[one + 1 :])
        elif kind == "doubled":
            spoiled += [[*whole[:at], whole[one], *whole[at:]] for at in range(one, count + 1)]
    for order in spoiled:
        with pytest.raises(RemoteError):
            assembled(described, order)
        tally.add()
    assert (count, tally.cases) == (10, expected)


class Restreamed(StoreServer):
    """Sends the parts of a prefix, which come when a session is opened, as ``change`` of them."""

    def __init__(self, folder: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
        self._change = change
        super().__init__(store_engine(), "127.0.0.1:0", Guard(read_tokens(token_file(folder))))

    def _streaming(self, method: Any) -> Any:
        inner = super()._streaming(method)
        if method.__name__ != "_open":
            return inner

        def answer(data: bytes, context: Any) -> Iterator[bytes]:
            said = list(inner(data, context))
            sent = [one for one in said if decode(one).kind in {"part", "end"}]
            yield from [one for one in said if one not in sent]
            yield from self._change(sent) if sent else ()

        return answer


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            lambda all_: [all_[1], all_[0], *all_[2:]],
            id="swapped",
            marks=pytest.mark.fault("reordered", "with an engine behind"),
        ),
        pytest.param(lambda all_: [all_[0], *all_], id="doubled", marks=pytest.mark.fault("doubled", "with an engine behind")),
        pytest.param(lambda all_: all_[1:], id="missing", marks=pytest.mark.fault("closed", "with an engine behind")),
    ],
)
def test_a_drafter_goes_on_without_such_a_prefix(tmp_path: Path, change: Callable[[list[bytes]], list[bytes]]) -> None:
    server = Restreamed(tmp_path, change)
    server.start()
    try:
        with drafter(tmp_path, server.port, compressor="random", keep=0.5, remote_timeout=5.0) as engine:
            got = engine.generate(prompts(2), PARAMS)
        same(got, plain(prompts(2), PARAMS))
        assert any(output.metrics.degraded for output in got)
    finally:
        server.stop()


# -- questions ---------------------------------------------------------------------------------------


def opening(server: StoreServer, ids: Sequence[int], new_tokens: int = 16) -> Message:
    asked = {
        "facts": server.facts,
        "prefix": len(ids) - 5,
        "compressor": None,
        "options": {},
        "params": {"max_new_tokens": new_tokens},
        "generate": 0,
        "stateless": 0,
        "send": None,
        "compressed": 0,
    }
    return Message("open", asked, ids_to_bytes(list(ids)))


def opened(link: Link, message: Message) -> tuple[str, Message]:
    """The name of a new session and its first verdict."""
    answers = [answer for answer in link.stream("open", message) if answer.kind != "beat"]
    return answers[0].text("session"), answers[-1]


@pytest.mark.fault("doubled", "questions asked again, at once and late")
@pytest.mark.fault("reordered", "a question overtakes another, or comes late")
def test_questions_that_come_twice_late_and_out_of_order(tmp_path: Path, tally: Tally) -> None:
    """Two sessions take turns; after each answer every question so far is asked again, newest first."""
    asked = prompts(2)
    expected = [output.token_ids for output in plain(asked, PARAMS)]
    repeats = refused = 0
    with store(tmp_path) as server:
        link = Link(f"127.0.0.1:{server.port}", TOKEN, None, 20.0)
        sessions = [opened(link, opening(server, ids)) for ids in asked]
        tokens = [list(verdict.fields["tokens"]) for _, verdict in sessions]
        past: list[list[tuple[Message, Message]]] = [[], []]
        done = [False, False]
        while not all(done):
            for which, (number, _) in enumerate(sessions):
                if done[which]:
                    continue
                right = expected[which][len(tokens[which]) : len(tokens[which]) + 2]
                seq = len(past[which]) + 1
                fields = {"session": number, "seq": seq, "base": len(tokens[which]), "drafts": list(right)}
                early = Message("verify", {**fields, "seq": seq + 1})
                with pytest.raises(RemoteRefused, match="another state"):  # the one behind overtakes it
                    link.ask("verify", early)
                question = Message("verify", fields)
                answer = link.ask("verify", question)
                past[which].append((question, answer))
                tokens[which] += answer.fields["tokens"]
                done[which] = answer.fields["finish"] is not None
                for age, (old, said) in enumerate(reversed(past[which])):
                    if age == 0:
                        assert link.ask("verify", old) == said, "the same question, another answer"
                        repeats += 1
                    else:
                        with pytest.raises(RemoteRefused, match="another state"):
                            link.ask("verify", old)
                        refused += 1
        for number, _ in sessions:
            link.ask("close", Message("close", {"session": number}))
            with pytest.raises(RemoteRefused, match="no such session"):
                link.ask("close", Message("close", {"session": number}))
        link.close()
    tally.add(repeats + refused, sum(tuple(ours) != theirs for ours, theirs in zip(tokens, expected, strict=True)))
    assert repeats >= 10
    assert refused >= 20


# -- tenants -----------------------------------------------------------------------------------------


@pytest.mark.fault("tenants", "of a verifier")
def test_eight_tenants_with_vocabularies_of_their_own(tmp_path: Path, tally: Tally) -> None:
    """Eight threads on one store, each with a token of its own: everyone's own answers, nobody else's sessions."""
    tenants = 8
    known = [f"tenant-{number}-with-a-token-of-its-own" for number in range(tenants)]
    asked = [[number * 64 + token % 64 for token in PREFIX[:60] + prompt(9, seed=number)] for number in range(tenants)]
    params = SamplingParams(max_new_tokens=8)
    expected = [output.token_ids for output in plain(asked, params)]
    lines = "\n".join(f"t{number}:{token}" for number, token in enumerate(known))
    failures: list[str] = []
    numbers: dict[int, str] = {}
    ready = threading.Barrier(tenants)

    with store(tmp_path, tokens=lines, limits=Limits()) as server:

        def work(tenant: int) -> None:
            link = Link(f"127.0.0.1:{server.port}", known[tenant], None, 60.0)
            try:
                numbers[tenant], verdict = opened(link, opening(server, asked[tenant], 8))
                ready.wait(60)
                for other in set(numbers.values()) - {numbers[tenant]}:
                    fields = {"session": other, "seq": 1, "base": 1, "drafts": []}
                    with pytest.raises(RemoteRefused, match="no such session"):
                        link.ask("verify", Message("verify", fields))
                tokens = list(verdict.fields["tokens"])
                seq = 1
                while verdict.fields["finish"] is None:
                    fields = {"session": numbers[tenant], "seq": seq, "base": len(tokens), "drafts": [tenant * 64]}
                    verdict = link.ask("verify", Message("verify", fields))
                    tokens += verdict.fields["tokens"]
                    seq += 1
                if tuple(tokens) != expected[tenant]:
                    failures.append(f"tenant {tenant} got {tokens}")
            except BaseException as error:  # noqa: BLE001 (the main thread looks at it)
                failures.append(f"tenant {tenant}: {error!r}")
                ready.abort()
            finally:
                link.close()

        threads = [threading.Thread(target=work, args=(tenant,)) for tenant in range(tenants)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    tally.add(tenants)
    assert len(set(numbers.values())) == tenants

"""The OpenAI API over a real socket: answers are those of the engine, faults have the status that clients know."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.served import MODEL, Served, served, tiny_engine
from vericache_core.engine import Engine
from vericache_core.runtime.sampling_params import SamplingParams

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = "the quick brown fox jumps over the lazy dog. " * 3
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny_engine()) as running:
        yield running


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    with tiny_engine(compressor=None, keep=None) as engine:
        yield engine


def expected(engine: Engine, prompt: Any, **params: Any) -> str:
    (output,) = engine.generate([prompt], SamplingParams(**{"max_new_tokens": 24, **params}))
    return output.text


def test_a_completion_is_what_plain_decoding_writes(server: Served, plain: Engine) -> None:
    answer = server.ask(TEXT, {"model": MODEL, "prompt": PROMPT})
    assert answer.status == 200
    body = answer.json
    assert body["object"] == "text_completion"
    assert [choice["text"] for choice in body["choices"]] == [expected(plain, PROMPT)]
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 24, "total_tokens": len(PROMPT) + 24}
    assert body["vericache"][0]["drafted"] > 0
    assert answer.headers["x-request-id"] in body["id"]


def test_a_chat_and_its_stream_say_the_same(server: Served, plain: Engine) -> None:
    ask = {"messages": MESSAGES, "max_completion_tokens": 20}
    whole = server.ask(CHAT, ask).json
    text = whole["choices"][0]["message"]["content"]
    assert text == expected(plain, MESSAGES, max_new_tokens=20)
    events = server.ask(CHAT, {**ask, "stream": True, "stream_options": {"include_usage": True}}).events
    deltas = [event["choices"][0]["delta"] for event in events[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert [event["choices"][0]["finish_reason"] for event in events[-2:-1]] == ["length"]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == whole["usage"]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_several_prompts_of_one_call(server: Served, plain: Engine) -> None:
    prompts = [PROMPT, PROMPT[5:], list(PROMPT.encode()[:40])]
    whole = server.ask(TEXT, {"prompt": prompts, "max_tokens": 12}).json
    texts = [choice["text"] for choice in whole["choices"]]
    assert texts == [expected(plain, prompt, max_new_tokens=12) for prompt in prompts]
    pieces: dict[int, str] = {}
    for event in server.ask(TEXT, {"prompt": prompts, "max_tokens": 12, "stream": True}).events:
        choice = event["choices"][0]
        pieces[choice["index"]] = pieces.get(choice["index"], "") + choice["text"]
    assert [pieces[index] for index in range(3)] == texts


def test_stop_strings_and_seeds_reach_the_engine(server: Served, plain: Engine) -> None:
    text = expected(plain, PROMPT)
    stop = text[6:8]
    answer = server.ask(TEXT, {"prompt": PROMPT, "stop": [stop]}).json["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (text[: text.index(stop)], "stop")
    sampled = {"prompt": PROMPT, "temperature": 1.5, "seed": 7}
    seeded = [server.ask(TEXT, sampled).json["choices"][0]["text"] for _ in range(2)]
    assert seeded == [expected(plain, PROMPT, temperature=1.5, seed=7)] * 2


def test_who_samples_without_a_seed_gets_another_answer_each_time(server: Served) -> None:
    texts = {server.ask(TEXT, {"prompt": PROMPT, "temperature": 2.0}).json["choices"][0]["text"] for _ in range(3)}
    assert len(texts) > 1


def test_a_call_may_do_without_drafts(server: Served) -> None:
    body = server.ask(TEXT, {"prompt": PROMPT, "compressor": "none"}).json
    assert (body["vericache"][0]["compressor"], body["vericache"][0]["drafted"]) == (None, 0)


def test_sixteen_calls_at_once_within_a_small_budget(plain: Engine) -> None:
    """Those that do not fit wait; every answer is the one that it is alone."""
    one = plain.adapter.layers[0].token_bytes * len(plain.adapter.layers) * 256
    prompts = [PROMPT[number:] for number in range(16)]
    with served(tiny_engine(device_budget=4 * one, full_kv="host")) as running, ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: running.ask(TEXT, {"prompt": prompt, "max_tokens": 16}), prompts))
        running.wait_until_idle()
    assert [answer.status for answer in answers] == [200] * 16
    assert [answer.json["choices"][0]["text"] for answer in answers] == [
        expected(plain, prompt, max_new_tokens=16) for prompt in prompts
    ]


def test_models_and_health(server: Served) -> None:
    models = server.ask("/v1/models", method="GET").json
    assert [model["id"] for model in models["data"]] == [MODEL]
    assert server.ask("/healthz", method="GET").text == "ready"


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_run_is_told_by_the_status(server: Served, stream: bool) -> None:
    """Of a stream, too: its first line comes only when the request was taken in."""
    for body, status, words in (
        ({"prompt": PROMPT, "max_tokens": 5000}, 400, "max_new_tokens="),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({"prompt": [1, 999]}, 400, "999 is outside the vocabulary"),
        ({"prompt": [PROMPT, ""]}, 400, "the prompt is empty"),
        ({"prompt": PROMPT, "model": "other"}, 404, "there is no model 'other' here"),
    ):
        answer = server.ask(TEXT, {**body, "stream": stream})
        assert answer.status == status
        assert words in answer.json["error"]["message"]
    server.wait_until_idle()


def test_bad_bodies_are_refused(server: Served) -> None:
    assert server.ask(TEXT, b"{", "POST").status == 400
    assert server.ask(TEXT, b"[" * 100_000, "POST").status == 400
    for path, half in ((TEXT, b'{"prompt": "\\ud800"}'), (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}')):
        answer = server.ask(path, half)
        assert (answer.status, "not Unicode text" in answer.text) == (400, True)
    assert server.ask(TEXT, {"prompt": "x"}, headers={"Content-Type": "text/plain"}).status == 415
    assert server.ask(TEXT, method="GET").status == 405
    assert server.ask("/v1/embeddings", {}).status == 404


def test_a_template_that_refuses_is_the_callers_fault(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(server.engine.tokenizer, "chat_template", refusing)
    answer = server.ask(CHAT, {"messages": MESSAGES})
    assert answer.status == 400
    assert "roles must alternate" in answer.json["error"]["message"]


def test_tokens_keep_others_out() -> None:
    known = {"a": hashlib.sha256(b"a" * 20).digest()}
    with served(tiny_engine(), known) as running:
        for headers in ({}, {"Authorization": "Bearer " + "b" * 20}, {"Authorization": "a" * 20}):
            for path, method in (("/v1/models", "GET"), (TEXT, "POST"), (CHAT, "POST")):
                answer = running.ask(path, {"prompt": "x"}, method, headers)
                assert (answer.status, answer.json["error"]["type"]) == (401, "authentication_error")
        right = {"Authorization": "Bearer " + "a" * 20}
        assert running.ask(TEXT, {"prompt": "x", "max_tokens": 2}, headers=right).status == 200
        assert running.ask("/healthz", method="GET").status == 200


def test_a_full_queue_says_when_to_come_again() -> None:
    with served(tiny_engine(max_running=1, max_queue=1)) as running, ThreadPoolExecutor(8) as pool:
        body = {"prompt": PROMPT, "max_tokens": 100}
        answers = list(pool.map(lambda _: running.ask(TEXT, body), range(8)))
        statuses = sorted(answer.status for answer in answers)
        assert statuses[0] == 200
        assert set(statuses) == {200, 429}
        assert {answer.headers["retry-after"] for answer in answers if answer.status == 429} == {"1"}
        running.wait_until_idle()


def test_who_hangs_up_in_the_middle_of_a_body_is_forgotten(server: Served) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: 100\r\n\r\n{")
    assert server.ask(TEXT, {"prompt": PROMPT, "max_tokens": 2}).status == 200
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_who_hangs_up_is_not_worked_for(stream: bool) -> None:
    with served(tiny_engine()) as running:
        connection = running.connect()
        body = b'{"prompt": "%s", "max_tokens": 800, "stream": %s}' % (PROMPT.encode(), b"true" if stream else b"false")
        connection.request("POST", TEXT, body, {"Content-Type": "application/json"})
        if stream:
            assert connection.getresponse().read(20)
        while not running.engine.loop.live:
            time.sleep(0.01)
        (request,) = running.engine.loop.live
        connection.close()
        running.wait_until_idle()
        assert request.output.finish_reason == "cancelled"


def test_a_server_that_stops_refuses_and_ends_what_runs() -> None:
    with served(tiny_engine()) as running:
        answers: list[Any] = []
        body = {"prompt": PROMPT, "max_tokens": 800}
        caller = threading.Thread(target=lambda: answers.append(running.ask(TEXT, body)))
        caller.start()
        while not running.engine.loop.live:
            time.sleep(0.01)
        running.stopping.set()
        assert running.ask(TEXT, body).status == 503
        assert running.ask("/healthz", method="GET").text == "draining"
        running.runner.close()
        caller.join(60)
        assert answers[0].status == 503
        assert running.runner.in_flight == 0


def test_an_engine_that_dies_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> bool:
        raise ZeroDivisionError("a bug")

    with served(tiny_engine()) as running:
        monkeypatch.setattr(running.engine, "step", breaks)
        answer = running.ask(TEXT, {"prompt": PROMPT})
        assert answer.status == 500
        assert "ZeroDivisionError: a bug" in answer.json["error"]["message"]
        assert running.runner.failed
        later = running.ask(TEXT, {"prompt": PROMPT})
        assert (later.status, "has stopped" in later.text) == (500, True)

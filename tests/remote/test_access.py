"""Who may come in, what both sides must have in common, and what one client may take."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.faulty import spec
from tests.fault_table import Tally
from tests.models import model
from tests.remote.stores import (
    PREFIX,
    TOKEN,
    drafter,
    other_model,
    plain,
    prompts,
    same,
    store,
    store_engine,
    token_file,
)
from vericache_core.builtin import IdentityCompressor
from vericache_core.cli import main as cli
from vericache_core.errors import ConfigError, RemoteRefused, UsageError
from vericache_core.remote.auth import channel_credentials, server_credentials
from vericache_core.remote.frames import Message, ids_to_bytes
from vericache_core.remote.limits import Limits
from vericache_core.remote.link import Link
from vericache_core.remote.shelf import prefix_key
from vericache_core.runtime.sampling_params import SamplingParams
from vericache_core.service.access import is_loopback, read_tokens

PARAMS = SamplingParams(max_new_tokens=8)
GOLDEN = "566c0987baeae44a626dfdb516b17b9ffd0b93c758fde0db4133f629ab2d285d"
OTHER = "another-token-9876543210-abcdef"


def opening(facts: dict[str, str], **fields: Any) -> Message:
    asked = {
        "facts": facts,
        "prefix": len(PREFIX),
        "compressor": "identity",
        "options": {},
        "params": {"max_new_tokens": 8},
        "generate": 0,
        "stateless": 0,
        "send": None,
        "compressed": 0,
        **fields,
    }
    return Message("open", asked, ids_to_bytes(prompts(1)[0]))


def opened(link: Link, message: Message) -> str:
    found = [answer for answer in link.stream("open", message) if answer.kind == "opened"]
    return found[0].text("session")


@pytest.mark.fault("strangers", "5 tokens, every call")
def test_strangers_are_turned_away_before_anything_is_made(tmp_path: Path, tally: Tally) -> None:
    with store(tmp_path) as server:
        for token in (None, "", TOKEN + "x", TOKEN[:-1], "Bearer"):
            link = Link(f"127.0.0.1:{server.port}", token, None, 5.0)
            for method in ("hello", "verify", "close", "echo"):
                with pytest.raises(RemoteRefused, match="no known token"):
                    link.ask(method, Message(method, {"facts": server.facts}))
            for method in ("open", "prefix", "rows"):
                with pytest.raises(RemoteRefused, match="no known token"):
                    list(link.stream(method, opening(server.facts)))
            link.close()
            tally.add(7)
        assert not server.verifier.sessions
        assert not len(server.verifier.shelf)
        (tmp_path / "wrong").write_text("this-is-not-the-right-token\n")
        with pytest.raises(RemoteRefused, match="no known token"):
            drafter(tmp_path, server.port, remote_token_file=str(tmp_path / "wrong"))


@pytest.mark.fault("identity", "between drafter and verifier")
@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("weights", lambda: {"loaded": other_model()}),
        ("dtype", lambda: {"loaded": model("llama", torch.bfloat16)}),
        ("model", lambda: {"loaded": model("qwen2")}),
        ("rows", lambda: {"rows": 8}),
    ],
)
def test_another_model_is_refused_by_the_name_of_the_field(
    tmp_path: Path, field: str, change: Callable[[], dict[str, Any]]
) -> None:
    with store(tmp_path) as server, pytest.raises(RemoteRefused, match=rf"differ in {field}\b"):
        drafter(tmp_path, server.port, **change())


@pytest.mark.fault("skew", "refused by the name of the field")
@pytest.mark.parametrize("field", ["protocol", "numerics", "page", "tokenizer"])
def test_skew_is_refused_by_name(tmp_path: Path, field: str) -> None:
    with store(tmp_path) as server:
        server.facts[field] = "something else"
        with pytest.raises(RemoteRefused, match=rf"differ in {field}\b"):
            drafter(tmp_path, server.port)


@pytest.mark.fault("compressor", "the store lacks it")
def test_a_compressor_that_the_store_lacks_is_recorded(tmp_path: Path) -> None:
    specs = [spec("elsewhere", IdentityCompressor)]
    with store(tmp_path) as server, drafter(tmp_path, server.port, specs=specs, compressor="elsewhere") as engine:
        (got,) = engine.generate(prompts(1), PARAMS)
        same([got], plain(prompts(1), PARAMS))
        assert "unknown compressor 'elsewhere'" in got.metrics.degraded[0]


@pytest.mark.fault("compressor", "the drafter lacks the one that the store offers")
def test_a_compressor_that_the_drafter_lacks_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it loads a model: there is none at that path."""
    engine = store_engine(specs=[spec("elsewhere", IdentityCompressor)], compressor="elsewhere")
    with store(tmp_path, engine) as server:
        link = ["--remote", f"127.0.0.1:{server.port}", "--remote-token-file", token_file(tmp_path)]
        assert cli.main(["draft", "-m", "/nowhere", "--no-plugins", *link, "a question"]) == 2
    assert "unknown compressor 'elsewhere'" in capsys.readouterr().err


class Older(IdentityCompressor):
    name = "shared"


class Newer(Older):
    """What a later release of the same compressor could be: its codes say so."""

    def extra(self) -> dict[str, Any]:
        return {"algorithm": 2}


@pytest.mark.fault("skew", "releases of one compressor: degraded, and why is recorded")
def test_another_release_of_the_compressor_is_recorded(tmp_path: Path) -> None:
    here, there = ([spec("shared", made)] for made in (Older, Newer))
    with (
        store(tmp_path, store_engine(specs=there)) as server,
        drafter(tmp_path, server.port, specs=here, compressor="shared") as engine,
    ):
        (got,) = engine.generate(prompts(1), PARAMS)
    same([got], plain(prompts(1), PARAMS))
    assert "written by another version" in got.metrics.degraded[0]


@pytest.mark.fault("hang", "a drafter that falls silent")
def test_a_silent_session_is_closed_and_its_memory_given_back(tmp_path: Path) -> None:
    with store(tmp_path, limits=Limits(idle=0.5)) as server:
        link = Link(f"127.0.0.1:{server.port}", TOKEN, None, 5.0)
        number = opened(link, opening(server.facts))
        (session,) = server.verifier.sessions.values()
        assert session.prefix.users == 1
        link.close()  # the client has gone without a word
        until = time.monotonic() + 20
        while server.verifier.sessions and time.monotonic() < until:
            time.sleep(0.05)
        assert not server.verifier.sessions
        assert session.prefix.users == 0
        assert session.request.full.device_bytes == 0
        assert not server.verifier.engine.loop.requests
        link = Link(f"127.0.0.1:{server.port}", TOKEN, None, 5.0)
        with pytest.raises(RemoteRefused, match="no such session"):
            link.ask("verify", Message("verify", {"session": number, "seq": 1, "base": 1, "drafts": []}))
        link.close()


@pytest.mark.fault("tenants", "sessions of a verifier")
def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    with store(tmp_path, tokens=f"one:{TOKEN}\ntwo:{OTHER}") as server:
        one, two = (Link(f"127.0.0.1:{server.port}", token, None, 5.0) for token in (TOKEN, OTHER))
        number = opened(one, opening(server.facts))
        for method, fields in (("verify", {"seq": 1, "base": 1, "drafts": []}), ("close", {})):
            with pytest.raises(RemoteRefused, match="no such session"):
                two.ask(method, Message(method, {"session": number, **fields}))
        with pytest.raises(RemoteRefused, match="no such session"):
            list(two.stream("prefix", Message("prefix", {"session": number, "compressed": 0})))
        opened(two, opening(server.facts))
        assert len(server.verifier.shelf) == 2, "a prefix was shared between tenants"
        one.ask("close", Message("close", {"session": number}))
        one.close()
        two.close()


def test_a_store_takes_no_more_than_its_limits(tmp_path: Path) -> None:
    with store(tmp_path, limits=Limits(tenant_sessions=1, tokens=200)) as server:
        link = Link(f"127.0.0.1:{server.port}", TOKEN, None, 5.0)
        opened(link, opening(server.facts))
        with pytest.raises(RemoteRefused, match="as many sessions"):
            opened(link, opening(server.facts))
        with pytest.raises(RemoteRefused, match="200"):
            opened(link, opening(server.facts, params={"max_new_tokens": 100}))
        with pytest.raises(RemoteRefused, match="unknown sampling parameter"):
            opened(link, opening(server.facts, params={"max_tokens": 1}))
        with pytest.raises(RemoteRefused, match="prefix"):
            opened(link, opening(server.facts, prefix=len(prompts(1)[0])))
        (session,) = server.verifier.sessions
        with pytest.raises(RemoteRefused, match="another state"):
            link.ask("verify", Message("verify", {"session": session, "seq": 7, "base": 1, "drafts": []}))
        with pytest.raises(RemoteRefused, match="another state"):
            link.ask("verify", Message("verify", {"session": session, "seq": 1, "base": 0, "drafts": []}))
        for drafts in ([512], [-1], ["a"], list(range(100)), "abc"):
            with pytest.raises(Exception, match="drafts"):
                link.ask("verify", Message("verify", {"session": session, "seq": 1, "base": 1, "drafts": drafts}))
        link.close()


@pytest.mark.fault("nonsense", "drafts")
def test_drafts_of_nonsense_get_the_right_tokens(tmp_path: Path) -> None:
    """A client that proposes anything at all: what comes back is what plain decoding gives."""
    (expected,) = plain(prompts(1), PARAMS)
    with store(tmp_path) as server:
        link = Link(f"127.0.0.1:{server.port}", TOKEN, None, 5.0)
        answers = list(link.stream("open", opening(server.facts)))
        session, verdict = answers[0].text("session"), answers[-1]
        tokens = list(verdict.fields["tokens"])
        seq = 1
        while verdict.fields["finish"] is None:
            drafts = [0, 511, 7][: 1 + seq % 3] if seq % 2 else list(expected.token_ids[len(tokens) : len(tokens) + 2])
            asked = {"session": session, "seq": seq, "base": len(tokens), "drafts": drafts}
            verdict = link.ask("verify", Message("verify", asked))
            assert link.ask("verify", Message("verify", asked)) == verdict, "the same question, another answer"
            tokens += verdict.fields["tokens"]
            seq += 1
        assert tuple(tokens) == expected.token_ids
        link.close()


@pytest.mark.fault("keys", "prefixes on a store's shelf")
def test_keys_of_prefixes() -> None:
    """Golden: the same in every process, and every part of it counts."""
    key = prefix_key("tenant", [1, 2, 3], "snapkv", {"keep": 0.25})
    assert key == GOLDEN
    assert key == prefix_key("tenant", (1, 2, 3), "snapkv", {"keep": 0.25})
    others = [
        prefix_key("tenanT", [1, 2, 3], "snapkv", {"keep": 0.25}),
        prefix_key("tenant", [1, 2, 4], "snapkv", {"keep": 0.25}),
        prefix_key("tenant", [1, 2, 3, 4], "snapkv", {"keep": 0.25}),
        prefix_key("tenant", [1, 2, 3], "kivi", {"keep": 0.25}),
        prefix_key("tenant", [1, 2, 3], "snapkv", {"keep": 0.5}),
        prefix_key("tenant", [1, 2, 3], None, {}),
    ]
    assert len({key, *others}) == 7


@pytest.mark.fault("settings", "files of tokens")
@pytest.mark.parametrize(
    ("text", "complaint"),
    [("", "no token"), ("short", "5 characters"), (f"{TOKEN}\n{TOKEN}", "there already"), (f"a:{TOKEN}\nb:{TOKEN}", "already")],
)
def test_bad_token_files(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "tokens").write_text(text)
    with pytest.raises(UsageError, match=complaint):
        read_tokens(str(tmp_path / "tokens"))


@pytest.mark.fault("strangers", "nothing beyond the machine without TLS")
def test_what_may_go_unencrypted(tmp_path: Path) -> None:
    assert is_loopback("127.0.0.1:1")
    assert is_loopback("localhost:1")
    assert is_loopback("[::1]:1")
    assert not is_loopback("0.0.0.0:1")
    assert not is_loopback("store.example:1")
    with pytest.raises(ConfigError, match="not be encrypted"):
        drafter(tmp_path, 1, remote="192.0.2.1:7431")


@pytest.mark.fault("strangers", "a store open to everyone does not start")
@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--listen", "127.0.0.1:0"], "who they are"),
        (["--listen", "0.0.0.0:0", "--insecure"], "others can reach it"),
        (["--listen", "0.0.0.0:0", "--token-file", "x"], "without TLS"),
        (["--tls-cert", "x"], "go together"),
        (["--client-ca", "x"], "needs --tls-cert"),
    ],
)
def test_a_store_that_would_be_open_does_not_start(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["store", "serve", *argv]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.fault("settings", "of a store")
@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--listen", "127.0.0.1:99999"], "HOST:PORT"),
        (["--metrics", "localhost"], "HOST:PORT"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--idle", "nan"], "--idle"),
        (["--prefix-gib", "-1"], "--prefix-gib"),
        (["--grace", "-1"], "--grace"),
        (["--prefix", "nowhere.json"], "cannot read prefix"),
        (["--full-kv", "remote"], "a store holds the full KV itself"),
        (["--remote", "localhost:1"], "a store holds the full KV itself"),
        (["--full-kv", "remote", "--remote", "localhost:1"], "a store holds the full KV itself"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_model_is_loaded(
    argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["store", "serve", "-m", "/nowhere", "--insecure", *argv]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.fault("settings", "a port that is taken, before a model is loaded")
@pytest.mark.parametrize(
    "argv",
    [
        ["store", "serve", "--insecure", "--listen"],
        ["store", "serve", "--insecure", "--listen", "127.0.0.1:0", "--metrics"],
        ["draft", "-c", "identity", "--remote", "127.0.0.1:1", "--metrics"],
    ],
)
def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert cli.main([argv[0], *argv[1:], address, "-m", "/nowhere"]) == 2
    err = capsys.readouterr().err
    assert f"cannot listen on {address}" in err
    assert "another port" in err


@pytest.mark.fault("settings", "flags of a drafter that contradict")
def test_metrics_of_a_drafter_that_does_not_stay(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["draft", "-c", "identity", "--remote", "127.0.0.1:1", "-m", "/nowhere", "--metrics", "127.0.0.1:0"]
    assert cli.main([*argv, "a prompt"]) == 2
    assert "standard input" in capsys.readouterr().err
    assert cli.main([*argv, "--grace", "-1"]) == 2
    assert "--grace" in capsys.readouterr().err


@pytest.mark.fault("settings", "files that hold no certificates")
def test_files_that_hold_no_certificates(tmp_path: Path) -> None:
    (tmp_path / "junk").write_text("junk")
    junk = str(tmp_path / "junk")
    with pytest.raises(UsageError, match="certificate"):
        server_credentials(junk, junk, None)
    (tmp_path / "empty").write_text("")
    for name in (junk, str(tmp_path / "empty")):
        with pytest.raises(UsageError, match="certificate"):
            channel_credentials(name, None, None)
    with pytest.raises(UsageError, match="HOST:PORT"):
        drafter(tmp_path, 1, remote="localhost")

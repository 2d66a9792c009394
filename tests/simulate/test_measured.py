"""Measured runs beside simulated ones, with runs that the simulator itself made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vericache_core.cache.pages import PAGE
from vericache_core.cli import main as cli
from vericache_core.errors import ConfigError, UsageError
from vericache_core.runtime.calibration import Calibration, Fingerprint
from vericache_core.runtime.costs import CostModel, Link
from vericache_core.simulate.hardware import DEVICES
from vericache_core.simulate.measured import ENGINE_PAGE, MeasuredRow, compare, read_runs

TOKEN = 23_040
COSTS = CostModel({8: 0.037, 32: 0.055, 128: 0.135}, 5e-11, 2.4e-7, {"host": Link(0.0, 1.6e-10)}, 30)
FINGERPRINT = Fingerprint("cpu", 2, "2.13", "demo", "x", "bfloat16")
MACHINE = Calibration(FINGERPRINT, COSTS)
PROMPTS = (600, 700)
HEAD = {"schema": "vericache.bench.throughput.runs/1", "head": {"device": "cpu"}}


def calibrated(costs: CostModel) -> Calibration:
    return Calibration(FINGERPRINT, costs)


def traced(windows: list[list[float]], drafts: bool = True) -> dict[str, Any]:
    """A trace of rounds that ended when ``windows`` says, each with a draft step before if there were ``drafts``."""
    phases = [[at - 0.05, at - 0.04, request, "draft"] for at, request, _, _ in windows if drafts]
    return {"windows": windows, "phases": phases + [[at - 0.03, at, request, "verify"] for at, request, _, _ in windows]}


def line(system: str, workload: str = "long", **run: Any) -> dict[str, Any]:
    slow = workload != "long"
    facts = {
        "prompt_tokens": list(PROMPTS),
        "new_tokens": 33,
        "tier": "host" if slow else None,
        "budget_share": 1.0 if slow else None,
    }
    found = {
        "decoded": 64,
        "decode_seconds": 2.0,
        "swap_hidden_fraction": None,
        "peak_device_kv_bytes": 31_000_000,
        "swap_bytes": 0,
        "swap_seconds": 0.0,
        "trace": None if system == "plain" else traced([[0.1, 0, 8, 8], [0.2, 1, 8, 3], [0.3, 1, 8, 8]], system != "ngram"),
        **run,
    }
    return {"system": system, "workload": workload, "facts": facts, "repetition": 0, "run": found}


def written(path: Path, *lines: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(one) + "\n" for one in (HEAD, *lines)) + '{"system": "cut o')
    return str(path)


def test_runs_are_read_with_their_wrong_drafts_and_the_speed_of_their_link(tmp_path: Path) -> None:
    name = "vericache snapkv:keep=0.25 x8"
    again = line(name, decode_seconds=4.0, trace=None)
    skipped = {"system": "lossy", "workload": "long", "facts": {}, "problem": "does not fit", "skipped": True}
    slow = line(name, "slow-host-30", swap_bytes=7e8, swap_seconds=2.0, swap_hidden_fraction=0.9)
    first, second, third = read_runs(written(tmp_path / "runs", line("plain"), line(name), again, skipped, slow))
    assert (first.system, first.answers, first.link, first.tier) == ("plain", (), None, None)
    assert second.tokens_per_s == pytest.approx((32 + 16) / 2)
    assert second.processor == "cpu"
    assert [[at for at, wrong in enumerate(answer) if wrong == 1] for answer in second.answers] == [[], [3]]
    assert (third.link, third.hidden, third.tier, third.budget_share) == (3.5e8, 0.9, "host", 1.0)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "cannot be read"),
        ("", "holds no runs"),
        ('{"schema": "vericache.simulate/1"}\n', "holds no runs"),
        (json.dumps(HEAD) + '\n{"workload": "long", "system": "plain", "run": {}}\n', "of another form"),
        (json.dumps(HEAD) + "\n" + json.dumps(line("plain", decode_seconds=0.0)), "of another form.*ZeroDivisionError"),
        (json.dumps(HEAD) + "\n" + json.dumps(line("plain", trace=traced([[0.1, 2, 4, 3]]))), "of another form.*IndexError"),
        (json.dumps(HEAD) + "\n" + json.dumps({**line("plain"), "system": 3}), "of another form.*TypeError"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    path = tmp_path / "runs"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=reason):
        read_runs(str(path))


def row(system: str, **changes: Any) -> MeasuredRow:
    answers = () if system == "plain" else ((0.0,) * 33,) * 2
    facts = {"workload": "long", "prompts": PROMPTS, "new_tokens": 33, "tier": None, "budget_share": None, "hidden": None}
    return MeasuredRow(
        **{
            "system": system,
            "tokens_per_s": 40.0,
            "peak": 3.1e7,
            "link": None,
            "processor": "cuda",
            "answers": answers,
            **facts,
            **changes,
        }
    )


def test_plain_decoding_takes_a_step_a_token() -> None:
    found = compare(row("plain"), MACHINE, TOKEN, 0.2, 2)
    assert found.tokens_per_s is not None
    step = 0.037 + (sum(PROMPTS) + 2 + 31) * TOKEN * 5e-11
    assert found.tokens_per_s == pytest.approx(2 / step, rel=0.01)
    assert found.peak == pytest.approx((sum(PROMPTS) + 64) * TOKEN, rel=0.01)
    assert found.off["tokens_per_s"] == pytest.approx(found.tokens_per_s / 40 - 1)
    assert found.hidden is None


def test_windows_and_what_is_kept_are_those_of_the_name() -> None:
    short, long, kept = (
        compare(row(f"vericache snapkv:keep={name}"), MACHINE, TOKEN, 0.9, 2) for name in ("0.25 x1", "0.25 x7", "0.5 x7")
    )
    assert short.tokens_per_s is not None
    assert long.tokens_per_s is not None
    assert kept.peak is not None
    assert short.tokens_per_s != long.tokens_per_s
    assert kept.peak - (long.peak or 0) == pytest.approx(0.25 * sum(PROMPTS) * TOKEN, rel=0.02)


def test_wrong_drafts_come_where_they_came() -> None:
    """Windows of 7 and answers of 33: five rounds when all is right, and one more for a wrong draft in the first."""
    costs = CostModel({128: 1.0}, 0.0, 0.0, layers=30)
    wrong = tuple(float(at == 3) for at in range(33))
    steps = []
    for answers in (((0.0,) * 33,) * 2, (wrong, (0.0,) * 33)):
        found = compare(row("vericache snapkv:keep=0.25 x7", answers=answers), calibrated(costs), TOKEN, 0.2, 2)
        steps.append(64 / (found.tokens_per_s or 1))
    assert steps == pytest.approx([4 * 8, 4 * 8 + 4])


@pytest.mark.parametrize(
    ("rounds", "window"),
    [
        ([[0.1, 0, 8, 8], [0.2, 1, 8, 3], [0.3, 0, 8, 8], [0.4, 0, 8, 8], [0.5, 0, 4, 4]], 8),
        ([[0.1, 0, 8, 8], [0.2, 1, 5, 3], [0.3, 1, 8, 8]], None),
    ],
)
def test_a_window_that_the_name_leaves_out_is_that_of_the_rounds(
    tmp_path: Path, rounds: list[list[float]], window: int | None
) -> None:
    (found,) = read_runs(written(tmp_path / "runs", line("lockstep snapkv:keep=0.25", trace=traced(rounds))))
    assert found.drafted == window


def test_a_lockstep_row_is_simulated_with_the_window_of_its_rounds() -> None:
    costs = CostModel({128: 1.0}, 0.0, 0.0, layers=30)
    wrong = tuple(float(at == 3) for at in range(33))
    found = compare(row("lockstep snapkv:keep=0.25", drafted=7, answers=(wrong, (0.0,) * 33)), calibrated(costs), TOKEN, 0.2, 2)
    assert 64 / (found.tokens_per_s or 1) == pytest.approx(4 * 8 + 4)


def test_the_link_is_that_of_the_run() -> None:
    facts: dict[str, Any] = {"tier": "host", "budget_share": 0.5, "hidden": 0.9}
    fast, slow = (
        compare(row("vericache snapkv:keep=0.25 x8", link=link, **facts), MACHINE, TOKEN, 0.2, 2) for link in (1e10, 1e7)
    )
    assert (fast.tokens_per_s or 0) > 2 * (slow.tokens_per_s or 0) > 0
    assert fast.hidden is not None
    assert fast.off["hidden"] == pytest.approx(fast.hidden - 0.9)
    assert (fast.peak or 0) <= 0.5 * (sum(PROMPTS) + 66) * TOKEN


@pytest.mark.parametrize(
    ("system", "answers", "reason"),
    [
        ("transformers", (), "not a system"),
        ("ngram", (), "no rounds of proposals"),
        ("vericache kivi x8", (), "no rounds of drafts"),
    ],
)
def test_what_cannot_be_simulated_says_so(system: str, answers: tuple[tuple[float, ...], ...], reason: str) -> None:
    found = compare(row(system, answers=answers), MACHINE, TOKEN, 0.2, 2)
    assert reason in (found.skipped or "")
    assert found.off == {"tokens_per_s": None, "hidden": None, "peak": None}


def test_an_ngram_row_takes_the_steps_that_its_proposals_took(tmp_path: Path) -> None:
    """32 tokens after the first: request 0 is wrong once, request 1 never."""
    windows = [[1.0, 0, 4, 4], [2.0, 0, 8, 3], [3.0, 0, 3, 3], [4.0, 0, 6, 6], [5.0, 0, 10, 10]]
    windows += [[1.0, 1, 4, 4], [2.0, 1, 8, 8], [3.0, 1, 10, 10], [4.0, 1, 6, 6]]
    runs = written(tmp_path / "runs", line("ngram", trace=traced(windows, drafts=False)))
    (row,) = read_runs(runs)
    assert row.answers == ()
    costs = CostModel({128: 1.0}, 0.0, 0.0, layers=30)
    found = compare(row, calibrated(costs), TOKEN, 0.2, 2)
    # Rounds of both that run side by side share a step; on a CPU each costs the host a moment, too.
    assert 64 / (found.tokens_per_s or 1) == pytest.approx(5 + 9 * DEVICES["cpu-2"].between)


def test_an_auto_row_knows_what_others_know(tmp_path: Path) -> None:
    slow = {"swap_bytes": 7e8, "swap_seconds": 2.0}
    chosen = line("auto", "slow-host-30", trace=traced([[0.1, 0, 2, 1], [0.2, 0, 2, 2]], drafts=False))
    drafted = line("vericache snapkv:keep=0.25 x8", "slow-host-30", **slow)
    auto, _, _ = read_runs(written(tmp_path / "runs", chosen, drafted, line("vericache other:keep=0.5 x8")))
    assert (auto.kept, auto.link) == (0.25, 3.5e8)
    assert [answer.count(1.0) for answer in auto.answers] == [0, 1]
    assert auto.lookups[0].wrong[:5] == (0.0, 1.0, 0.0, 0.0, 1 / 4)
    drafting = line("auto", "slow-host-30", **slow)
    own, asked, _ = read_runs(written(tmp_path / "runs", drafting, line("ngram", "slow-host-30"), line("ngram")))
    assert (own.kept, own.link) == (None, 3.5e8)
    assert own.lookups == asked.lookups != ()


def test_a_row_that_stopped_drafting_takes_the_rest_from_a_window_of_one_length(tmp_path: Path) -> None:
    """A round that failed says nothing of the tokens after it, whether the window was the controller's or the mode, too."""
    failed = traced([[0.1, 0, 4, 0]])
    fixed = line("vericache snapkv:keep=0.25 x8", trace=traced([[0.1, 0, 8, 8], [0.2, 0, 8, 8]]))
    wavering = line("vericache snapkv:keep=0.25 xauto", trace=failed)
    other = line("vericache kivi:keep=0.5 x8", trace=traced([[0.1, 0, 8, 1]]))
    choosing = [line(name, trace=failed) for name in ("auto", "auto kivi:keep=0.5")]
    rows = read_runs(written(tmp_path / "runs", wavering, *choosing, fixed, other))
    for each in rows[:2]:
        assert each.answers[0][:18] == (1.0, *(0.0,) * 7, 1 / 17, *(0.0,) * 8, 1 / 17)
    assert rows[2].answers[0][:3] == (1.0, 1.0, 2 / 3)
    assert rows[3].answers[0][:3] == (0.0, 0.0, 0.0)
    alone = read_runs(written(tmp_path / "alone", wavering))[0]
    assert alone.answers == ((1.0,) * 32,) * 2


def test_an_auto_row_is_told_of_proposals_by_one_that_always_asks(tmp_path: Path) -> None:
    """A round of its own that asked about nothing may be one that thought nothing of what there was."""
    silent = {"phases": [[0.1, 0.2, 0, "decode"], [0.2, 0.3, 0, "decode"]], "windows": [[0.4, 0, 2, 2]]}
    asking = line("ngram", trace=traced([[0.1, 0, 4, 4], [0.2, 0, 4, 1]], drafts=False))
    auto, ngram = read_runs(written(tmp_path / "runs", line("auto", trace=silent), asking))
    assert auto.lookups == ngram.lookups
    assert auto.lookups[0].found[:3] == (1.0, 1.0, 1.0)
    (alone,) = read_runs(written(tmp_path / "alone", line("auto", trace=silent)))
    assert alone.lookups[0].found[:3] == (0.0, 0.0, 1.0)


def test_on_a_cpu_the_cores_that_compute_copy_what_is_swapped() -> None:
    """Of one swap of a request in lock step, as the clock has it: the link is so slow that nothing else is seen."""
    facts: dict[str, Any] = {"tier": "host", "budget_share": 1.0, "drafted": 7, "link": 1e7}
    shares = {}
    for processor in ("cpu", "cuda"):
        found = compare(row("lockstep snapkv:keep=0.25", processor=processor, **facts), MACHINE, TOKEN, 0.2, 2)
        assert found.hidden is not None
        shares[processor] = found.hidden
    # What a byte takes to be copied, by what it takes to come, of which one layer of 30 is not hidden.
    assert shares["cpu"] - shares["cuda"] == pytest.approx(1.6e-10 / 1e-7 * 29 / 30, rel=0.01)


def test_where_the_calibrated_link_was_limited_a_byte_is_copied_as_fast_as_the_device_does() -> None:
    """The same rate of link in the run, and the time of a byte in the costs ten thousand times that of a copy."""
    facts: dict[str, Any] = {"tier": "host", "budget_share": 1.0, "drafted": 7, "link": 1e7, "processor": "cpu"}
    link = 1 / DEVICES["cpu-2"].link
    free = calibrated(replace(COSTS, links={"host": Link(0.0, link)}))
    limited = replace(calibrated(replace(COSTS, links={"host": Link(0.0, 10_000 * link)})), link_bytes_per_s=1e-4 / link)
    name = "lockstep snapkv:keep=0.25"
    first, second = (compare(row(name, **facts), machine, TOKEN, 0.2, 2).tokens_per_s for machine in (free, limited))
    assert first == second


def test_a_tier_that_was_not_calibrated_is_named() -> None:
    facts: dict[str, Any] = {"tier": "disk", "budget_share": 1.0, "drafted": 7, "link": 1e7, "processor": "cpu"}
    with pytest.raises(ConfigError, match="no cost is known for the 'disk' tier"):
        compare(row("lockstep snapkv:keep=0.25", **facts), MACHINE, TOKEN, 0.2, 2)


def test_the_pages_of_the_engine_are_those_of_its_caches() -> None:
    assert ENGINE_PAGE == PAGE


def test_the_command_prints_how_far_off_each_row_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = written(tmp_path / "runs", line("plain"), line("vericache snapkv:keep=0.25 x8"), line("ngram"), line("other"))
    costs = tmp_path / "costs.json"
    MACHINE.save(costs)
    command = ["simulate", "-m", "smollm2-135m", "--compare", runs, "--calibration", str(costs)]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "vericache.simulate.compare/1"
    plain, drafted, ngram, unknown = found["rows"]
    assert plain["off"]["tokens_per_s"] == pytest.approx(plain["simulated"]["tokens_per_s"] / 32 - 1)
    assert drafted["simulated"]["peak_device_kv_bytes"] > plain["simulated"]["peak_device_kv_bytes"]
    assert ngram["simulated"]["tokens_per_s"] > plain["simulated"]["tokens_per_s"]
    assert unknown["skipped"]
    assert cli.main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 5
    assert cli.main(command[:-2]) == 2
    assert "needs the costs of the machine" in capsys.readouterr().err

"""`scripts/bench network`, the parts without processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.network import contest
from benchmarks.network.contest import Settings, hold_contest, steps_in_turn
from benchmarks.network.contestants import BASELINE, Contestant, contestants
from benchmarks.network.measured import AtRate, Lap, Learned, Measured, Timed, measured_from
from benchmarks.network.network import goals_of, sections, split_names
from benchmarks.network.pair import HostFailed
from benchmarks.report.draw import markdown, show
from benchmarks.report.picture import save_png
from benchmarks.workload.rates import parse_rate, show_rate
from benchmarks.workload.text import CONTEXT, Reader, kept_text, size_for, training_text
from shoal.errors import ConfigError, ShoalError
from shoal.testing.hosts import Hosts, make_hosts

SETTINGS = Settings(rates=(10**8, 10**9), steps=4, parameters=2e4, small=1e4, rounds=3, batch=2)


@given(st.integers(100, 10**5), st.sampled_from([("kbit", 10**3), ("mbit", 10**6), ("gbit", 10**9)]))
def test_rates_are_read(number: int, unit: tuple[str, int]) -> None:
    assert parse_rate(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize("text", ["", "fast", "100", "-1mbit", "0gbit", "1mbyte", "mbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a rate is like 100mbit"):
        parse_rate(text)


@given(st.integers(2, 200), st.integers(1, 30))
def test_whoever_has_a_period_makes_whole_ones(period: int, rounds: int) -> None:
    one = Contestant("x", "x", period=period)
    steps = [steps_in_turn(one, turn, rounds, pace=1.0) for turn in range(rounds)]
    assert sum(steps) > 0
    assert sum(steps) % period == 0
    assert sum(steps) < period + 2 * rounds
    assert max(steps) - min(steps) <= 1


@given(st.floats(1e5, 1e9))
def test_a_model_is_about_as_large_as_asked(parameters: float) -> None:
    assert size_for(parameters).parameters == pytest.approx(parameters, rel=0.15)


def test_the_count_of_parameters_is_that_of_the_model() -> None:
    size = size_for(3e5)
    assert sum(p.numel() for p in Reader(size).parameters()) == size.parameters


def test_nobody_trains_on_the_kept_text() -> None:
    training, kept = training_text(6), kept_text()
    assert len(training) % 6 == 0
    assert training.tensors[0].shape[1] == CONTEXT
    seen = {bytes(row.tolist()) for row in training.tensors[0]}
    again = sum(bytes(row.tolist()) in seen for row in kept.tensors[0])
    assert again < 0.02 * len(kept)  # a few lines of the library occur twice


def test_strategies_are_split_outside_of_brackets() -> None:
    assert split_names(" ddp, local(16) ,ddp(bucket_mb=4, order=x)+none,") == [
        "ddp",
        "local(16)",
        "ddp(bucket_mb=4, order=x)+none",
    ]


def test_contestants() -> None:
    made = contestants(["ddp(bucket_mb=8)", "torch ddp fp16"])
    assert [one.name for one in made] == [BASELINE, "ddp(bucket_mb=8)", "torch ddp fp16"]
    assert [one.peer for one in made] == [True, False, True]
    assert [contestants([text])[1].period for text in ("ddp", "local(16)", "diloco(50)")] == [1, 16, 50]
    for text, said in [("torch ddp fp61", "torch ddp fp16"), ("ddpp", "'ddp'"), ("ps", "no servers")]:
        with pytest.raises(ConfigError, match=said):
            contestants([text])


def test_only_root_makes_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda word: f"/sbin/{word}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="you are user 1000; start it with sudo"), make_hosts(2):
        pass


def test_without_the_commands_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ConfigError, match="install iproute2"), make_hosts(2):
        pass


class Still(Hosts):
    """Hosts that nobody made."""

    def limit(self, rate: int | None) -> None:
        del rate


class Told:
    """Two hosts that answer at once, but for what they cannot do. Every step takes a second and ten bytes."""

    def __init__(self, broken: dict[str, str]) -> None:
        self.broken = broken
        self.asked: list[tuple[str, str]] = []

    def ask(self, seconds: float, command: dict[str, Any]) -> list[dict[str, Any]]:
        assert seconds > 0
        name = command.get("name", "")
        self.asked.append((command["do"], name))
        if self.broken.get(name) == command["do"]:
            raise HostFailed(f"{name} cannot {command['do']}")
        steps = command.get("steps", 1)
        done = {"seconds": 1.0 * steps, "bytes": 10 * steps, "losses": [2.0] * steps, "loss": 1.5}
        return [done, {**done, "seconds": 1.5 * steps, "losses": [4.0] * steps}]

    def said(self) -> tuple[str, ...]:
        return ("shoal: hello",)


def contest_of(names: list[str], broken: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Measured:
    @contextmanager
    def start(_: Hosts) -> Iterator[Told]:
        yield Told(broken)

    monkeypatch.setattr(contest, "start_pair", start)
    return hold_contest(Still(("a", "b"), "switch"), contestants(names), SETTINGS, lambda _: None)


def test_the_slower_host_and_both_hosts_losses_count(monkeypatch: pytest.MonkeyPatch) -> None:
    result = contest_of(["ddp", "local(16)"], {}, monkeypatch)
    assert [at.rate for at in result.rates] == [10**8, 10**9]
    assert result.rates[0].timed["ddp"].step_seconds == 1.5
    assert result.rates[0].timed["local(16)"].steps == 16
    assert result.rates[0].timed["ddp"].step_bytes == 10
    assert result.learned["ddp"] == Learned((3.0,) * 4, 1.5)
    assert result.failed == {}


@pytest.mark.parametrize("when", ["make", "run", "measure"])
def test_who_fails_is_left_out_and_named(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = contest_of(["ddp", "zero1"], {"zero1": when}, monkeypatch)
    assert result.failed == {"zero1": f"zero1 cannot {when}"}
    assert result.names == [BASELINE, "ddp"]
    assert all(list(at.timed) == [BASELINE, "ddp"] for at in result.rates)


def test_without_torch_there_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShoalError, match="torch DDP failed"):
        contest_of(["ddp"], {BASELINE: "run"}, monkeypatch)


def test_too_little_memory_is_said_before_anything_starts() -> None:
    huge = Settings(rates=(10**8,), steps=1, parameters=1e13, small=1e4, rounds=1, batch=1)
    with pytest.raises(ConfigError, match="GB side by side"):
        hold_contest(Still(("a", "b"), "switch"), contestants(["ddp"]), huge, lambda _: None)


def made_up() -> Measured:
    def timed(*seconds: float, period: int = 1) -> Timed:
        return Timed(period, tuple(Lap(2, 2 * value, 2e6) for value in seconds))

    at = AtRate(
        10**8,
        9.5e7,
        {BASELINE: timed(6.0, 4.0, 5.0), "ddp": timed(3.0, 2.0, 100.0), "local(6)": timed(1, 2, 9, period=6)},
        ("shoal: hello",),
    )
    learned = {name: Learned(tuple(4.0 - i / 50 for i in range(100)), 2.0) for name in at.timed}
    learned["ddp"] = Learned(learned["ddp"].losses, 2.02)
    settings = {"timed_parameters": 1, "timed_batch": 1, "learning_parameters": 1, "steps": 100, "rounds": 3}
    return Measured(settings, (at,), learned, {"zero1": "it [broke]"})


def test_what_follows_from_the_measurements() -> None:
    result = made_up()
    at = result.rates[0]
    assert at.timed[BASELINE].step_seconds == 5.0  # the median
    assert at.timed["local(6)"].step_seconds == 4.0  # the mean of the period
    assert at.speed("ddp") == pytest.approx(5 / 3)
    assert at.slowdown("ddp", BASELINE) == 0.5  # round by round: 0.5, 0.5, 20
    assert at.timed["ddp"].step_bytes == 1e6
    assert result.gap("ddp") == pytest.approx(0.01)


def test_a_result_is_plain_values_and_back() -> None:
    assert measured_from(json.loads(json.dumps(made_up().to_json()))) == made_up()


def test_goals_are_those_whose_contestants_were_there() -> None:
    (goal,) = goals_of(made_up(), None)
    assert (goal.found, goal.met) == (1.25, False), "ddp is faster, and too far above torch DDP's loss"
    auto = made_up().rates[0].timed["ddp"]
    at = AtRate(10**8, 9.5e7, {**made_up().rates[0].timed, "ddp + auto": auto})
    assert [g.found for g in goals_of(Measured(made_up().settings, (at,), {}), None)] == [1.0]


def test_a_result_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rich.console import Console

    for section in sections(made_up()):
        show(section, Console(width=140))
    out = capsys.readouterr().out
    for words in (
        "100 Mb/s",
        "local(6)",
        "1.67 ×",
        "+1.00%",
        "95 Mb/s",
        "hello",
        "it [broke]",
        "smaller model",
    ):
        assert words in out
    assert "| local(6) | 4.00 s | 1.25 × | 1.000 |" in markdown(sections(made_up()))
    pytest.importorskip("matplotlib")
    bars = Measured(made_up().settings, made_up().rates, {})
    for name, result in (("all", made_up()), ("bars", bars)):
        save_png(result, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert show_rate(10**9) == "1 Gb/s"

"""Workers that are lost while they train: the run goes on, and its end has the bits of an undisturbed one."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from commands import Done, environment, finish, losses, write
from warm import Command

from shoal.cluster import stalls
from shoal.cluster.recovery import elastic
from shoal.report.events import read_events
from shoal.report.schema import problems
from shoal.train.state import pace

TRAIN = """
import hashlib, pathlib, signal, sys, time

def lose(rank, step, how, times, where):
    "Be lost so many times, here and now."
    seen = pathlib.Path(f"lost-{rank}-{step}")
    if run.world.rank != int(rank) or now != int(step) or where != "forward" * (how != "body"):
        return
    before = len(seen.read_text()) if seen.exists() else 0
    if before == int(times):
        return
    seen.write_text("x" * (before + 1))
    if how == "slow":
        time.sleep(3)
        return
    if how == "error":
        raise ConnectionResetError("the cable is out")
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
    time.sleep(60)

def losing(output, batch):
    for word in words:
        lose(*word.split(":"), "forward")
    return loss(output, batch)

now, words = 1, [word for word in sys.argv[1:] if word != "plain"]
if len(words) < len(sys.argv) - 1:  # nothing in it depends on the number of workers but rounding
    plain = lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    settings |= dict(model=plain, precision="fp64")
run = shoal.Run(**settings | dict(loss=losing, schedule="exponential(0.99)", schedule_every="call"))
measured = [run.evaluate(data).loss]
for end in (10, 25, 40):
    for step in run.steps(end):
        for word in words:
            now = step.number
            lose(*word.split(":"), "")
        now = step.number + 1
    run.schedule_step()
    measured.append(run.evaluate(data).loss)
    run.log({"end": end})
state = run.state_dict()
if rank == 0:
    text = b"".join(value.numpy().tobytes() for value in state.values())
    print(hashlib.sha256(text + repr(measured).encode()).hexdigest(), os.environ["SHOAL_MEMORY"])
"""
SOON = ("ddp", "zero3", "shared")
EXACT = (*SOON, "zero1", "zero2")


def sooner() -> None:
    """In the forked command: snapshots every few of these tiny steps, and a hang is found after a second."""
    pace.SHARE = 3.0
    elastic.COOL_SECONDS = 1.0
    stalls.TELL_SECONDS = 0.5
    stalls.LOOK_SECONDS = 0.25


def train(
    folder: Path, strategy: str, *words: str, workers: int | str = 2, options: tuple[str, ...] = ()
) -> Done:
    command = ("-m", "shoal", "run", "--workers", str(workers), "--strategy", strategy, *options)
    script = write(folder, TRAIN)
    return finish(Command(folder, environment(folder), (*command, script, *words), enter=sooner))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[float | None]]]:
    """What two workers end with when nothing happens, by strategy: all with buckets give the same bits."""

    @cache
    def run(strategy: str) -> tuple[str, list[float | None]]:
        folder = tmp_path_factory.mktemp("undisturbed")
        done = train(folder, strategy)
        assert came_back(done) == []
        return done.out.split()[0], losses(folder)

    return lambda strategy: run("zero3" if strategy == "zero3" else "ddp")


def came_back(done: Done) -> list[int]:
    """From which steps."""
    assert done.code == 0, done.err
    result, memory = done.out.split()
    assert not os.path.exists(memory), "snapshots are left in memory"
    assert len(result) == 64
    found = re.findall(
        r"shoal: going on from (the beginning|step \d+), [\d.]+ s after the (?:loss|change)\.", done.err
    )
    return [0 if place == "the beginning" else int(place.split()[1]) for place in found]


@pytest.mark.parametrize(
    "strategy",
    [s if s in SOON else pytest.param(s, marks=pytest.mark.all_only) for s in EXACT],
)
def test_a_lost_worker_changes_no_bit(
    tmp_path: Path, strategy: str, undisturbed: Callable[[str], tuple[str, list[float | None]]]
) -> None:
    draws = random.Random(strategy)
    first, second = sorted(draws.sample(range(12, 40), 2))
    how = {"ddp": "stop", "zero3": "error"}.get(strategy, "body")
    words = (f"{draws.randrange(2)}:{first}:{how}:1", f"{draws.randrange(2)}:{second}:kill:1")
    done = train(tmp_path, strategy, *words, options=("--hang-limit", "1"))
    back = came_back(done)
    assert len(back) == 2, done.err
    assert 0 < back[0] < first, done.err
    assert back[0] <= back[1] < second, done.err
    state, each = undisturbed(strategy)
    assert done.out.split()[0] == state, "the state at the end"
    assert losses(tmp_path) == each, "each step once, with the loss it had"


def test_a_place_that_keeps_dying_is_given_up_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    one = train(tmp_path / "one", "solo", "plain", workers=1)
    done = train(tmp_path, "ddp", "plain", "2:13:kill:1", "2:21:body:1", "0:35:slow:1", workers="2:3")
    assert len(came_back(done)) == 3, done.err
    told = [line for line in done.err.splitlines() if "workers go on" in line]
    assert told == [
        "shoal: worker 2 was lost twice in a row: 2 workers go on, and 3 after a minute.",
        "shoal: 3 workers go on, in place of 2.",
    ]
    assert one.code == 0, one.err
    assert losses(tmp_path) == pytest.approx(losses(tmp_path / "one"), rel=1e-10)
    events = read_events(tmp_path / "log" / "events-launcher.jsonl")
    assert [event["event"] for event in events] == ["failure", "failure", "resize", "resize"]
    assert not [problem for event in events for problem in problems(event)]


@pytest.mark.all_only
@pytest.mark.parametrize("strategy", ["ddp * tp2", "local(4)", "zero3 * tp2", "zero1 + int8"])
def test_the_same_for_four_workers(tmp_path: Path, strategy: str) -> None:
    (tmp_path / "plain").mkdir()
    # Under local a worker without samples makes no step, and a checkpoint keeps one count of steps for all.
    options = ("--set", "drop_last=true") if strategy.startswith("local") else ()
    plain = train(tmp_path / "plain", strategy, "plain", workers=4, options=options)
    draws = random.Random(strategy)
    words = [f"{draws.randrange(4)}:{step}:body:1" for step in sorted(draws.sample(range(5, 40), 3))]
    done = train(tmp_path, strategy, "plain", *words, workers=4, options=options)
    assert len(came_back(done)) == 3
    assert (done.out.split()[0], losses(tmp_path)) == (plain.out.split()[0], losses(tmp_path / "plain"))


def test_what_kills_twice_is_named_and_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, "ddp", "1:21:kill:9")
    assert done.code == 137
    *_, last, why = done.err.strip().splitlines()
    assert re.match(
        r"shoal: worker 1 of 2 \(.*\) was killed by SIGKILL in step 21, forward and backward", last
    )
    assert re.fullmatch(
        r"shoal: It was lost there twice, by SIGKILL\. Its samples in that step: [\d, ]+\.", why
    )


def test_without_retries_the_first_loss_ends_the_run(tmp_path: Path) -> None:
    done = train(tmp_path, "ddp", "1:21:kill:1", options=("--retries", "0"))
    (lost,) = read_events(tmp_path / "log" / "events-launcher.jsonl")
    assert (lost["event"], lost["rank"]) == ("failure", 1), "the page of a dead run says who died"
    assert done.code == 137
    assert "start again" not in done.err

"""The local queue for real: jobs that run, wait, make way, fail and start again, and `kill -9` of it all."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import commands
import psutil
import pytest
from commands import SOURCE, Done

from shoal.errors import ConfigError
from shoal.jobs import accept
from shoal.jobs.engine import ENDS
from shoal.jobs.job import JobSpec
from shoal.jobs.local import lock, scheduler
from shoal.jobs.local.engine import Local
from shoal.jobs.local.store import Row, Store

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="locks and /proc are those of Linux"
)

WAIT = 90.0

SCRIPT = """
import fcntl, os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
job = os.environ["SHOAL_JOB"]
alone = open(f"{folder}/alone-{job}-{os.environ['RANK']}", "w")
try:
    fcntl.flock(alone, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    open(f"{folder}/doubled-{job}", "w").close()
print("begins", job, flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until and not os.path.exists(f"{folder}/go"):
    time.sleep(0.02)
print("ends", job, flush=True)
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""
"""Waits for a while or for a file, and shows where two processes are the same worker of the same job."""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    """A queue of a host with four cores, whatever this one has."""
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))
    (tmp_path / "train.py").write_text(SCRIPT)
    # A script that needs no torch: the launcher, which imports it for all workers, is what takes the time.
    made = Local(tmp_path / "queue")
    with closing(Store(made.folder)):
        (made.folder / "host.json").write_text('{"cores": 4, "memory": 1000, "devices": [0, 1]}')
    yield made
    (tmp_path / "go").touch()
    for job in made.jobs():
        if job.state not in ENDS:
            made.cancel(job.id)
    wait_for(lambda: all(job.state in ENDS for job in made.jobs()))
    lock.end_holders(made.folder / scheduler.LOCK)


def wait_for(true: Callable[[], bool], seconds: float = WAIT) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.02)


def spec(engine: Local, *words: str, **more: object) -> JobSpec:
    folder = engine.folder.parent
    made = JobSpec(("train.py", *(words or ("60",))), folder=str(folder), name="train", **more)  # type: ignore[arg-type]
    accept(engine, "local", made)
    return made


def row(engine: Local, job: str) -> Row:
    with closing(Store(engine.folder)) as store:
        found = store.get(int(job))
    assert found is not None
    return found


def state(engine: Local, job: str) -> str:
    return row(engine, job).state


def begun(engine: Local, job: str) -> bool:
    return f"begins {job}" in "".join(engine.logs(job, follow=False))


def test_jobs_wait_for_room_and_for_each_other_make_way_and_go_on(engine: Local) -> None:
    first = engine.submit(spec(engine, "60", most=3, least=3, priority=0, memory=600))
    wait_for(lambda: begun(engine, first))
    second = engine.submit(spec(engine, "0", most=2, least=2))
    third = engine.submit(spec(engine, "0", after=(second,)))
    # The second has the higher priority and does not fit beside the first: that one makes way, and starts again.
    wait_for(lambda: state(engine, third) == "done")
    wait_for(lambda: row(engine, first).attempt == 2 and begun(engine, first))
    with closing(Store(engine.folder)) as store:
        said = [(job, what) for _, job, _, what in store.history()]
    assert (int(first), "preempt") in said
    assert said.index((int(second), "done 0")) < said.index((int(third), "start 1"))
    assert row(engine, first).failures == 0
    engine.cancel(first)
    wait_for(lambda: state(engine, first) == "cancelled")


@pytest.mark.all_only
def test_a_supervisor_that_is_asked_to_end_has_its_job_save_and_wait_again(engine: Local) -> None:
    """As when the machine goes down in order: SIGTERM to all."""
    job = engine.submit(spec(engine, "60", priority=0))
    wait_for(lambda: begun(engine, job))
    pid = row(engine, job).pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    wait_for(lambda: row(engine, job).attempt == 2)
    assert (row(engine, job).losses, row(engine, job).failures) == (0, 0)


@pytest.mark.all_only
def test_a_failed_job_starts_again_as_often_as_asked_and_what_waits_for_it_falls(engine: Local) -> None:
    bad = engine.submit(spec(engine, "0", "3", retries=1))
    after = engine.submit(spec(engine, "0", after=(bad,)))
    late = engine.submit(spec(engine, "60", seconds=0.5))
    wait_for(lambda: state(engine, after) == "cancelled")
    assert (row(engine, bad).state, row(engine, bad).code, row(engine, bad).attempt) == ("failed", 3, 2)
    assert f"job {bad}, after which it was to start, has failed" in row(engine, after).why
    wait_for(lambda: state(engine, late) == "failed")
    assert "stopped after its time" in row(engine, late).why


KINDS = ("scheduler", "supervisor", "launcher", "worker")


def kill_one(engine: Local, kind: str, draw: random.Random) -> bool:
    """`kill -9` of one process of the queue; whether there was one of that kind."""
    found: dict[str, list[psutil.Process]] = {each: [] for each in KINDS}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = process.cmdline()
            if str(engine.folder) in words and "schedule" in words:
                found["scheduler"].append(process)
            elif str(engine.folder) in words and "supervise" in words:
                found["supervisor"].append(process)
                launchers = process.children()
                found["launcher"] += launchers
                found["worker"] += [worker for launcher in launchers for worker in launcher.children()]
    if not found[kind]:
        return False
    with suppress(psutil.Error):
        draw.choice(found[kind]).send_signal(signal.SIGKILL)
        return True
    return False


@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.all_only)])
def test_no_kill_loses_or_doubles_a_job(engine: Local, kills: int) -> None:
    """Jobs whose worker is killed fail and have a retry for each; the others need none."""
    draw = random.Random(kills)
    jobs = [
        engine.submit(spec(engine, "2.5", most=1 + n % 2, retries=kills)) for n in range(max(3, kills // 4))
    ]
    struck = 0
    while struck < kills:
        time.sleep(draw.uniform(0.2, 0.8))
        struck += kill_one(engine, KINDS[struck % 4], draw)
        if all(job.state in ENDS for job in engine.jobs()):  # that also starts a scheduler where none is
            jobs.append(engine.submit(spec(engine, "2.5", retries=kills)))
    wait_for(lambda: all(job.state in ENDS for job in engine.jobs()), 60.0 + 5 * kills)
    assert [(job.id, job.state) for job in engine.jobs()] == [(job, "done") for job in jobs]
    assert not list(engine.folder.parent.glob("doubled-*"))
    with closing(Store(engine.folder)) as store:
        done = [job for _, job, _, what in store.history() if what.startswith("done")]
    assert sorted(done) == [int(job) for job in jobs], "each ends once"


def test_a_machine_that_was_started_anew_costs_no_job_and_no_retry(engine: Local) -> None:
    """The row of a job of another boot, whose lock nobody can hold any more."""
    with closing(Store(engine.folder)) as store:
        job = store.add(spec(engine, "0", account="me"), os.environ, time.time())
        attempt = store.begin(job, 1, (), time.time())
        assert attempt == 1
        store.supervised(job, 1, 1, "another boot")
        assert store.begin(job, 1, (), time.time()) is None, "it runs already"
    wait_for(lambda: engine.jobs()[0].state == "done")
    found = row(engine, str(job))
    assert (found.attempt, found.losses, found.failures) == (2, 0, 0)


def test_what_cannot_run_is_refused_before_it_is_submitted(engine: Local) -> None:
    for more, said in (
        ({"most": 5, "least": 5}, "5 workers need 5 cores, and this host has 4"),
        ({"memory": 2000}, "need 2000 bytes of memory, and this host has 1000"),
        ({"devices": 3}, "need 3 devices, and this host has 2"),
        ({"after": ("77",)}, "there is no job '77'"),
        ({"hosts": 2, "most": 2, "least": 2}, "--on local has no --hosts"),
        ({"reservation": "class"}, "there is no reservation 'class'; there are: none"),
    ):
        with pytest.raises(ConfigError, match=said):
            spec(engine, **more)
    assert engine.jobs() == []


def test_the_command_line(engine: Local) -> None:
    where = ["--queue", str(engine.folder)]

    def shoal(*words: str) -> Done:
        return commands.shoal(engine.folder.parent, *words, *where)

    said = shoal("submit", "train.py", "0", "--workers", "1", "--time", "2moons")
    assert (said.code, said.err) == (
        2,
        "shoal: --time 2moons is no time; write it like 2h, 90min, 1h30m or 1:30:00.\n",
    )
    dry = shoal("submit", "train.py", "0", "--workers", "1", "--dry-run")
    assert "-m shoal run --workers 1 train.py 0" in dry.out
    assert "reservation class: from" in shoal("reserve", "class", "--cores", "3", "--time", "1h").out
    assert "asks for more than will be free then" in shoal("reserve", "other", "--cores", "2").err
    assert "--from noon is no moment" in shoal("reserve", "other", "--cores", "1", "--from", "noon").err
    assert shoal("jobs").out.startswith("no jobs")
    assert "job 1 is in the queue" in shoal("submit", "train.py", "0", "--workers", "1").out
    assert shoal("logs", "1", "-f").out == "begins 1\nends 1\n"
    wait_for(lambda: state(engine, "1") == "done")
    assert "train  done" in shoal("jobs").out
    assert "is done; there is nothing to cancel" in shoal("cancel", "1").err

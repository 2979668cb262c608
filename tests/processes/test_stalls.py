"""Workers that are stopped or hang: who it is, in which step and phase, and what ends the run."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from commands import environment, finish, write
from warm import Command

from shoal.cluster import stalls

TRAIN = """
import signal, sys, time
what, victim = sys.argv[1], 1
done = 0

def slow(output, batch):
    if what == "hang" and rank == victim and done == 20:
        time.sleep(1000)
    return loss(output, batch)

class Data(torch.utils.data.TensorDataset):
    def __getitem__(self, i):
        if what == "long" and rank == victim and done == 19:
            time.sleep(3)
        return super().__getitem__(i)

settings |= dict(loss=slow, data=Data(x, y), log=None)
run = shoal.Run(**settings)
for step in run.steps(30):
    done = step.number
    if done == 20 and rank == victim:
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if what == "long":
            time.sleep(4)
    if done > 20 and what == "stop":
        time.sleep(0.1)
if what == "long":
    time.sleep(4)
print("trained", done)
"""


def sooner() -> None:
    """In the forked command: its launcher finds after a second what takes ten."""
    stalls.TELL_SECONDS = 1.0
    stalls.LONG_SECONDS = 2.0
    stalls.LOOK_SECONDS = 0.25


def begin(folder: Path, what: str, *options: str) -> Command:
    words = ("-m", "shoal", "run", "--workers", "2", *options, write(folder, TRAIN), what)
    return Command(folder, environment(folder), words, enter=sooner)


WHO = r"shoal: worker 1 of 2 \(host .+, pid (\d+)\) "


# In zero3 the others wait in their forward pass, where the hung one is too.
@pytest.mark.parametrize("strategy", ["zero3", pytest.param("ddp", marks=pytest.mark.all_only)])
def test_a_worker_that_hangs_is_named_and_ends_the_run(tmp_path: Path, strategy: str) -> None:
    done = finish(begin(tmp_path, "hang", "--strategy", strategy, "--hang-limit", "3", "--retries", "0"))
    assert done.code == 4, done.err
    told = re.search(WHO + r"has not moved for \d+ s: step 21, forward and backward.*", done.err)
    assert told is not None, done.err
    assert "Worker 0 waits." in told[0]
    assert "it is taken for lost after 3 s (--hang-limit)" in told[0]
    ended = re.search(WHO + r"hangs, for \d+ s now: step 21, forward and backward\. .*", done.err)
    assert ended is not None, done.err
    assert "Nothing was saved" in ended[0]
    assert re.search(r'  \| File ".*train.py", line \d+, in slow\n', done.err), "the stack of the hung worker"


def test_a_stopped_worker_is_named_and_goes_on(tmp_path: Path) -> None:
    command = begin(tmp_path, "stop")
    first = command.first_error()
    found = re.match(WHO + r"has not moved for .*: after step 20, in the script's own code", first)
    assert found is not None, first
    assert "stopped by a signal" in first
    assert f"kill -CONT {found[1]}" in first
    os.kill(int(found[1]), signal.SIGCONT)
    done = finish(command)
    assert (done.code, done.out) == (0, "trained 30\n"), done.err
    assert re.search(WHO + "goes on: ", done.err), done.err


def test_what_may_take_long_is_said_and_waited_for(tmp_path: Path) -> None:
    done = finish(begin(tmp_path, "long", "--hang-limit", "2"))
    assert (done.code, done.out) == (0, "trained 30\n"), done.err
    for place in ("step 20, loading data", "after step 20, in the script's own code"):
        told = re.search(WHO + rf"has not moved for \d+ s: {place}.*", done.err)
        assert told is not None, done.err
        assert "It is waited for" in told[0]
    assert "s: after its last step" not in done.err, "what comes then is the script's own business"


def test_under_ps_the_job_ends_without_a_stopped_worker(tmp_path: Path) -> None:
    done = finish(begin(tmp_path, "stop", "--strategy", "ps"))
    assert (done.code, done.out) == (0, "trained 30\n"), done.err
    assert "shoal: worker 1 does not move, and the job is done without it; it is ended." in done.err

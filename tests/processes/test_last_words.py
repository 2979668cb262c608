"""What is said when a job ends early: which rank, where it was, why, and what is saved."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from commands import DEADLINE, finish, shoal, start, write

from shoal.testing.spawn import SpawnError, spawn
from shoal.world.world import World

TRAIN = """
import signal, time
what = sys.argv[1]
keeps = dict(checkpoint="ck", checkpoint_every=2) if "keeps" in sys.argv else {}
run = shoal.Run(**{**settings, **keeps, "log": None})
for step in run.steps(2000 if what == "wait" else 8):
    if rank == 1 and step.number == 5:
        if what == "kill":
            memory = torch.ones(5 << 29, dtype=torch.uint8)  # the kernel has to free it
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            sys.exit(0)
        if what == "gone":
            os._exit(0)
        if what == "raise":
            while not any(name.startswith("step-4") for name in os.listdir("ck")):
                time.sleep(0.01)
            {}["missing"]
        if what == "left":
            os._exit(3)
    if what == "wait":
        open(f"at-{rank}", "w").close()
        time.sleep(0.02)
print("trained", step.number)
"""

WHO = r"shoal: worker 1 of 2 \(host .+, pid \d+\) "
NOTHING = "Nothing was saved: with checkpoint=FOLDER and checkpoint_every=N the same command would go on."


def test_a_large_worker_that_is_killed_is_the_cause(tmp_path: Path) -> None:
    done = shoal(tmp_path, "run", "--workers", "2", "--retries", "0", write(tmp_path, TRAIN), "kill")
    assert done.code == 128 + signal.SIGKILL
    words = r"was killed by SIGKILL after step 5, in the script's own code \(out of memory\? see dmesg\)\. "
    assert re.search(WHO + words + re.escape(NOTHING) + "\n$", done.err), done.err
    assert "PeerLost" not in done.err


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("exit", 2, r"rank 1 has ended its script after step 5"),
        ("gone", 4, WHO + r"ended without an error after step 5, .* does its script call exit\(\)"),
        ("left", 3, WHO + r"ended with exit code 3 after step 5, .* it left no report: .*os\._exit"),
    ],
)
def test_who_leaves_a_pipeline_early_is_named(tmp_path: Path, what: str, code: int, words: str) -> None:
    strategy = "ddp * pp2(microbatches=2)"
    script = write(tmp_path, TRAIN)
    options = ("--workers", "2", "--no-dry-run", "--retries", "0", "--strategy", strategy)
    done = shoal(tmp_path, "run", *options, script, what)
    assert (done.code, done.out) == (code, ""), done.err
    assert re.search(words, done.err), done.err
    assert done.err.count("\n") == 1, "no traceback of gloo's, no table of torch's"


def test_an_error_says_what_is_saved(tmp_path: Path) -> None:
    script = write(tmp_path, TRAIN)
    done = shoal(tmp_path, "run", "--workers", "2", script, "raise", "keeps")
    first, *_, last = done.err.splitlines()
    assert re.fullmatch(WHO + "failed after step 5, in the script's own code:", first)
    assert last == f"shoal: The same command goes on from step 4, the newest checkpoint in {tmp_path}/ck."
    again = shoal(tmp_path, "run", "--workers", "2", script, "on", "keeps")
    assert (again.code, again.out) == (0, "trained 8\n"), again.err
    over = shoal(tmp_path, "run", "--workers", "2", script, "on", "keeps")
    assert "shoal: nothing left to do: 8 steps are done, and 8 were asked for." in over.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_says_that_nothing_was_saved(tmp_path: Path, number: signal.Signals) -> None:
    command = start(tmp_path, "-m", "shoal", "run", "--workers", "2", write(tmp_path, TRAIN), "wait")
    deadline = time.monotonic() + DEADLINE
    while len(list(tmp_path.glob("at-*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    command.send_signal(number)
    done = finish(command)
    assert done.code == 128 + number
    words = rf"shoal: stopped by {number.name} (after|in) step \d+, .*\. " + re.escape(NOTHING)
    assert re.fullmatch(words + "\n", done.err), done.err


def end_somehow(world: World, how: str) -> None:
    if world.rank == 0:
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os.abort()
    time.sleep(60)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("exit", "ended with exit code 7 without a word"),
        ("kill", "was killed by SIGKILL"),
        ("abort", r"was killed by SIGABRT(.|\n)*in end_somehow"),
    ],
)
def test_a_spawned_process_that_says_nothing_is_explained(how: str, words: str) -> None:
    with pytest.raises(SpawnError, match=rf"rank 0 failed:\npid \d+ {words}"):
        spawn(end_somehow, 2, how)


def different_calls(world: World) -> None:
    import threading

    from shoal.errors import CallMismatch
    from shoal.world.failure import end_in_one_sentence

    end_in_one_sentence(world.rank)

    def watch() -> None:
        raise CallMismatch("ranks make different calls")

    if world.rank == 0:
        threading.Thread(target=watch).start()
    time.sleep(60)


def test_a_thread_that_ends_a_spawned_process_leaves_its_sentence() -> None:
    with pytest.raises(SpawnError, match="rank 0 failed:\nCallMismatch: ranks make different calls"):
        spawn(different_calls, 2)

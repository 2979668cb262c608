"""Ctrl-C and SIGTERM: the step is finished and saved on all ranks, and the same command goes on from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import DEADLINE, Done, finish, losses, shoal, start, write
from warm import Command

from shoal.checkpoint.folder import open_folder

LONG = """
import pathlib, time
pathlib.Path(f"pid-{rank}").write_text(str(os.getpid()))
run = shoal.Run(**settings, checkpoint="ck", loader_workers=int(os.environ.get("LOADERS", "0")))
for step in run.steps(100000):
    if step.number == 3:
        pathlib.Path(f"at-{rank}").touch()
    time.sleep(0.01)
print("not here")
"""
SLEEPY = """
import pathlib, time
run = shoal.Run(**settings, checkpoint="ck")
for step in run.steps(3):
    pathlib.Path(f"at-{rank}").touch()
    time.sleep(60)
"""


def until_there(folder: Path, workers: int, command: subprocess.Popen[str] | Command) -> None:
    deadline = time.monotonic() + DEADLINE
    while len(list(folder.glob("at-*"))) < workers:
        assert command.poll() is None, command.communicate()
        assert time.monotonic() < deadline, "it has not begun"
        time.sleep(0.01)


def check_saved(folder: Path, done: Done) -> int:
    assert "not here" not in done.out
    assert "Traceback" not in done.err
    found = re.search(
        r"shoal: stopped after step (\d+); saved .*/ck/step-\1; the same command goes on", done.err
    )
    assert found is not None, done.err
    assert "shoal: finishing this step and saving; once more ends at once." in done.err
    step = int(found[1])
    manifest = open_folder(folder / "ck" / f"step-{step}").manifest
    assert manifest is not None
    assert manifest.step == step
    return step


@pytest.mark.parametrize("strategy", ["zero2", "local(4)", "ps"])
def test_ctrl_c_under_the_launcher(tmp_path: Path, strategy: str) -> None:
    script = write(tmp_path, LONG)
    command = start(tmp_path, "-m", "shoal", "run", "--workers", "2", "--strategy", strategy, script)
    until_there(tmp_path, 2, command)
    command.send_signal(signal.SIGINT)
    # A terminal tells the workers too: for them it is the same Ctrl-C.
    for file in tmp_path.glob("pid-*"):
        os.kill(int(file.read_text()), signal.SIGINT)
    done = finish(command)
    assert done.code == 130, done.err
    step = check_saved(tmp_path, done)
    again = shoal(tmp_path, "run", "--workers", "2", "--strategy", strategy, "--steps", str(step + 2), script)
    assert again.code == 0, again.err
    assert len(losses(tmp_path)) == step + 2, "it goes on where it was"
    over = shoal(tmp_path, "run", "--workers", "2", "--strategy", strategy, "--steps", "2", script)
    assert "shoal: nothing left to do" in over.err


def test_a_signal_that_one_rank_gets_ends_all(tmp_path: Path) -> None:
    command = start(tmp_path, "-m", "shoal", "run", "--workers", "2", write(tmp_path, LONG))
    until_there(tmp_path, 2, command)
    os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGTERM)
    done = finish(command)
    assert done.code == 143, done.err
    assert "shoal: stopped after step" in done.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_alone(tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = number == signal.SIGINT
    monkeypatch.setenv("LOADERS", "1" if loads else "0")
    command = start(tmp_path, write(tmp_path, LONG))
    until_there(tmp_path, 1, command)
    command.send_signal(number)
    if loads:  # a terminal tells the processes that prepare batches too, which the last step may need
        children = Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split()
        assert children
        for child in children:
            os.kill(int(child), number)
    done = finish(command)
    assert done.code == 128 + number, done.err
    check_saved(tmp_path, done)


def test_the_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    command = start(tmp_path, "-m", "shoal", "run", "--workers", "2", write(tmp_path, SLEEPY))
    until_there(tmp_path, 2, command)
    command.send_signal(signal.SIGINT)
    assert "finishing this step" in command.first_error()
    command.send_signal(signal.SIGINT)
    done = finish(command)
    assert done.code == 130, done.err
    assert not (tmp_path / "ck" / "step-1").exists()

"""One run at a time in a folder: who lives is not disturbed, and who is gone is in nobody's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from shoal.checkpoint import lock as locks
from shoal.checkpoint.folder import latest
from shoal.checkpoint.lock import NAME, FolderLock, FolderTaken, Owner
from shoal.errors import ConfigError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same with less waiting."""
    for name, seconds in (("BEAT", 0.1), ("WATCH", 1.0), ("PATIENCE", 0.3), ("_SETTLE", 0.05)):
        monkeypatch.setattr(locks, name, seconds)


def left_behind(root: Path, **changes: Any) -> Owner:
    """A lock that somebody has left, like ours but for some changes."""
    owner = replace(Owner.me("theirs"), **changes)
    (root / NAME).write_text(json.dumps(asdict(owner)))
    return owner


def taken(root: Path) -> FolderLock:
    lock = FolderLock(root)
    lock.take()
    assert json.loads((root / NAME).read_text())["pid"] == os.getpid()
    return lock


def test_a_lock_is_there_while_it_is_held(tmp_path: Path) -> None:
    lock = taken(tmp_path / "new")
    lock.take()
    lock.check()
    with pytest.raises(
        FolderTaken, match="in use by another Run of this script; give each Run a checkpoint folder"
    ):
        FolderLock(tmp_path / "new").take()
    lock.release()
    assert not list((tmp_path / "new").iterdir())
    taken(tmp_path / "new").release()


def test_at_a_prompt_the_new_run_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = taken(tmp_path)
    monkeypatch.setattr(locks, "is_interactive", lambda: True)
    second = taken(tmp_path)
    assert (
        "was in use by an earlier Run of this session; this run takes over its lock."
        in capsys.readouterr().err
    )
    with pytest.raises(FolderTaken, match="has been taken over by"):
        first.check()
    first.release()
    second.check()
    second.release()


def test_a_lock_goes_with_its_run(tmp_path: Path) -> None:
    lock = taken(tmp_path)
    del lock
    assert not (tmp_path / NAME).exists(), "nobody can use it any more"


def test_a_process_that_lives_is_not_disturbed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        started = locks._started(other.pid)
        owner = left_behind(tmp_path, pid=other.pid, started=started)
        words = (
            rf"in use by process {other.pid} on {owner.host}, since \d+-.* UTC; wait until that run has ended"
        )
        with pytest.raises(FolderTaken, match=words):
            FolderLock(tmp_path).take()
        assert "theirs" in (tmp_path / NAME).read_text()
        threading.Timer(0.1, lambda: (tmp_path / NAME).unlink()).start()
        taken(tmp_path).release()  # it was just about to end
        assert other.stdin is not None
        other.stdin.close()


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 7}, {"pid": 1, "started": 99}, {"started": 1}])
def test_a_process_that_is_gone_is_said(
    tmp_path: Path, changes: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where another process has its number now."""
    owner = left_behind(tmp_path, **changes)
    begin = time.monotonic()
    taken(tmp_path).release()
    assert time.monotonic() - begin < locks.WATCH, "on this machine there is nothing to wait for"
    expected = f"shoal: {tmp_path} was in use by {owner}, which is gone; this run takes over its lock.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("machine", ["another boot", ""])
def test_another_machine_without_a_sign_of_life_is_gone(
    tmp_path: Path, machine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    left_behind(tmp_path, host="far", machine=machine)
    os.utime(tmp_path / NAME, (2e9, 2e9))  # its clock may be wrong
    taken(tmp_path).release()
    told = capsys.readouterr().err.splitlines()
    assert "was last used by process" in told[0]
    assert "looking for 1 s whether that run is still there." in told[0]
    assert "which is gone; this run takes over its lock." in told[1]


def test_another_machine_that_gives_signs_of_life_is_not_disturbed(tmp_path: Path) -> None:
    lock = taken(tmp_path)
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(text.replace(lock._owner.machine, "another boot"))  # type: ignore[union-attr]
    with pytest.raises(
        FolderTaken, match=r"in use by process .*; wait until that run has ended, stop it, or choose"
    ):
        FolderLock(tmp_path).take()
    lock.release()
    assert not (tmp_path / NAME).exists()


def test_half_a_lock_is_nobodys(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"host": "f')
    taken(tmp_path).release()


def test_who_slept_too_long_writes_nothing_more(tmp_path: Path) -> None:
    lock = taken(tmp_path)
    left_behind(tmp_path, host="far", pid=77)
    with pytest.raises(FolderTaken, match=r"has been taken over by process 77 on far.*writes nothing more"):
        lock.check()
    lock.release()
    assert (tmp_path / NAME).exists(), "it is the other's"


def test_a_lock_that_was_removed_by_hand_comes_back(tmp_path: Path) -> None:
    lock = taken(tmp_path)
    (tmp_path / NAME).unlink()
    lock.check()
    assert (tmp_path / NAME).exists()
    lock.release()


def test_one_of_two_takes_over(tmp_path: Path) -> None:
    """Both see that the owner is gone, at the same moment."""
    left_behind(tmp_path, pid=2**22 + 7)
    started, found = threading.Barrier(2), []

    def take() -> None:
        lock = FolderLock(tmp_path)
        started.wait()
        try:
            lock.take()
        except FolderTaken:
            found.append(None)
        else:
            found.append(lock)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len([lock for lock in found if lock is not None]) == 1
    assert len(found) == 2


# Two Runs in one script.


def run(folder: Path, **changes: Any) -> shoal.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(1, 1),
        "loss": lambda output, batch: ((output - batch[1]) ** 2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3),
        "data": TensorDataset(torch.arange(32.0).view(32, 1), torch.ones(32, 1)),
        "global_batch": 8,
        "strategy": "solo",
        "checkpoint": str(folder),
        "checkpoint_every": 1,
        "log": None,
        "progress": False,
    }
    return shoal.Run(**{**settings, **changes})


def test_two_runs_that_take_turns_in_one_folder(tmp_path: Path) -> None:
    one, other = run(tmp_path), run(tmp_path)
    steps = one.steps(4)
    next(steps)
    with pytest.raises(
        ConfigError, match="in use by another Run of this script; give each Run a checkpoint folder"
    ):
        next(other.steps(4))
    with pytest.raises(ConfigError, match="in use by another Run of this script"):
        run(tmp_path)
    assert [report.number for report in steps] == [2, 3, 4]
    with pytest.raises(
        ConfigError, match=r"another run has written step-4 into .* since this one looked there; start"
    ):
        next(other.steps(4))
    assert latest(tmp_path) == "step-4"
    assert [report.number for report in run(tmp_path).steps(6)] == [5, 6]
    assert not (tmp_path / NAME).exists()


def fail_at_five(run: shoal.Run) -> None:
    for report in run.steps(9):
        _ = report.number / (report.number - 5)


def test_a_run_after_another_goes_on(tmp_path: Path) -> None:
    """However the one before has ended: at its end, by a break, by an error; saves between loops are its own."""
    first = run(tmp_path)
    for report in first.steps(9):
        if report.number == 2:
            break
    first.save("mine")
    assert next(first.steps(9)).number == 3
    second = run(tmp_path)
    assert second._progress.step == 3
    with pytest.raises(ZeroDivisionError):
        fail_at_five(second)
    third = run(tmp_path)
    assert third._progress.step == 5
    third.best("loss", 1.0)
    third.evaluate(TensorDataset(torch.ones(4, 1), torch.ones(4, 1)))
    third._checkpoints.wait()
    assert not (tmp_path / NAME).exists()

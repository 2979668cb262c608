"""A disk that is full for a while: said at once, tried again, and never a run that ends with nothing written."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import DEADLINE, environment, python, shoal, write
from torch import nn
from torch.utils.data import TensorDataset

import shoal as package
from shoal.checkpoint.folder import glance, latest, open_folder
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError
from shoal.train.state.progress import Progress

WIDE = """
import resource, time
settings |= dict(model=lambda: nn.Sequential(nn.Linear(5, 9000), nn.Linear(9000, 3)), checkpoint="disk/kept",
                 checkpoint_every=2)

def fill():
    with open("disk/fill", "wb", buffering=0) as file:
        while file.write(b"x" * 65536) == 65536:
            pass

def limit(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
"""
FULL = (
    WIDE
    + """
run = shoal.Run(**settings)
for step in run.steps(8):
    if step.number == 3:
        run._checkpoints._saver.idle()
    if step.number == 3 and rank == 0:
        try:
            fill()
        except OSError:
            pass
    if step.number == 5:
        run._checkpoints._saver.idle()
        if rank == 0:
            print("FREED", file=sys.stderr, flush=True)
            os.remove("disk/fill")
"""
)


def no_tmpfs() -> str:
    """Why no small disk can be made here."""
    if os.geteuid() != 0:
        return "only root can mount a small disk"
    done = subprocess.run(["unshare", "-m", "true"], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"no mount namespace: {done.stderr.strip()}"


def on_disk(folder: Path, size: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command with a small disk at `disk`, which goes with it; what is on it in the end comes to `saved`."""
    (folder / "disk").mkdir(exist_ok=True)
    inside = f'mount -t tmpfs -o size={size} tmpfs disk && "$@"; code=$?; cp -a disk saved; exit $code'
    return subprocess.run(
        ["unshare", "-m", "bash", "-c", inside, "-", sys.executable, *command],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@pytest.mark.skipif(bool(no_tmpfs()), reason=no_tmpfs() or "it can")
def test_a_disk_that_is_full_at_one_save_and_free_again(tmp_path: Path) -> None:
    done = on_disk(tmp_path, "6m", "-m", "shoal", "run", "--workers", "2", write(tmp_path, FULL))
    assert done.returncode == 0, done.stderr
    before, _, after = done.stderr.partition("FREED")
    told = [line for line in before.splitlines() if "could not be written" in line]
    assert len(told) == 1
    assert re.match(
        r"shoal: checkpoint step-4 could not be written \(rank [01]: \S+/disk/kept/\.step-4\.\S+/rank-000[01]"
        r"\.safetensors: No space left on device\); \d\.\d MB are free there and it takes 1\.0 MB; training goes on, "
        r"and the next save tries again \(failure 1 of 3 in a row\)\.$",
        told[0],
    ), told[0]
    assert "could not" not in after
    kept = tmp_path / "saved" / "kept"
    assert sorted(path.name for path in kept.iterdir()) == ["latest", "step-2", "step-6", "step-8"]
    assert list(verify(open_folder(kept / "step-8"))) == []


@pytest.mark.skipif(bool(no_tmpfs()), reason=no_tmpfs() or "it can")
def test_the_space_is_looked_at_when_a_run_begins(tmp_path: Path) -> None:
    script = write(tmp_path, WIDE + "print(len(list(shoal.Run(**settings).steps(1))))")
    done = on_disk(tmp_path, "600k", script)
    assert done.returncode == 2
    assert done.stdout == ""
    words = r"shoal: \S+/disk/kept has 0\.6 MB free, and a checkpoint takes about 1\.0 MB; free some space, or choose"
    assert re.match(words, done.stderr), done.stderr
    assert done.stderr.count("\n") == 1
    (tmp_path / "saved").rename(tmp_path / "first")
    done = on_disk(tmp_path, "1200k", script)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    assert "so there should be space for two.\n" in done.stderr


def test_three_in_a_row_end_the_run_on_every_rank(tmp_path: Path) -> None:
    """One rank's files are too large; the run ends with the third save, not when a fourth is due."""
    text = """
run = shoal.Run(**settings)
for step in run.steps(100):
    print(rank, step.number, flush=True)
    if step.number == 3:
        run._checkpoints._saver.idle()
    if step.number == 3 and rank == 1:
        limit(100_000)
"""
    done = shoal(tmp_path, "run", "--workers", "2", write(tmp_path, WIDE + text))
    assert done.code == 2, done.err
    assert "Traceback" not in done.err
    told = [line for line in done.err.splitlines() if "could not be written" in line]
    assert [line.partition(" could")[0] for line in told[:3]] == [
        f"shoal: checkpoint step-{n}" for n in (4, 6, 8)
    ]
    assert all("(rank 1: " in line and "File too large" in line for line in told[:3])
    assert told[2].endswith("the run ends (failure 3 of 3 in a row).")
    assert "shoal: 3 checkpoints in a row could not be written to" in told[3]
    assert "and the newest there is step-2; free some space or choose another folder" in told[3]
    assert max(int(line.split()[1]) for line in done.out.splitlines()) == 7
    assert sorted(path.name for path in (tmp_path / "disk" / "kept").iterdir()) == ["latest", "step-2"]
    again = python(tmp_path, "train.py", "--steps", "4")
    assert again.code == 0, again.err


# In this process, alone.


@contextmanager
def small_files(size: int = 1000) -> Iterator[None]:
    """No file may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run(folder: Path, **changes: Any) -> package.Run:
    settings: dict[str, Any] = {
        "model": lambda: nn.Linear(1000, 1),
        "loss": lambda output, batch: ((output - batch[1]) ** 2).mean(),
        "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3),
        "data": TensorDataset(torch.ones(32, 1000), torch.ones(32, 1)),
        "global_batch": 8,
        "strategy": "solo",
        "checkpoint": str(folder),
        "checkpoint_every": 2,
        "log": None,
        "progress": False,
    }
    return package.Run(**{**settings, **changes})


def test_the_last_checkpoint_is_tried_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_files():
        made = run(tmp_path)
        steps = made.steps(2)
        assert next(steps).number == 1
        assert next(steps).number == 2
        made._checkpoints._saver.idle()  # type: ignore[union-attr]
    assert "checkpoint step-2 could not be written" in capsys.readouterr().err
    assert list(steps) == []
    assert open_folder(tmp_path / "step-2").manifest is not None
    with small_files(), pytest.raises(ConfigError, match=r"step-4: .*File too large\); .* are free"):
        list(run(tmp_path).steps(4))
    assert set(glance(tmp_path)) == {"step-2"}


def test_one_failure_is_forgotten_by_a_success(tmp_path: Path) -> None:
    made = run(tmp_path, checkpoint_every=1, checkpoint_failures=2)
    seen = []
    for report in made.steps(8):
        seen.append(report.number)
        made._checkpoints._saver.idle()  # type: ignore[union-attr]
        if report.number in (1, 3, 5):  # the next save fails
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]
    assert latest(tmp_path) == "step-8"
    with pytest.raises(ConfigError, match="checkpoint_failures=0; it must be at least 1"):
        run(tmp_path, checkpoint_failures=0)


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"kept cannot be written to \(.*(File exists|Not a directory)\); choose"
    ):
        run(tmp_path / "file" / "kept")
    with small_files(0), pytest.raises(ConfigError, match=r"kept cannot be written to \(.*File too large\)"):
        run(tmp_path / "kept")
    with small_files(0):
        assert run(tmp_path / "kept", checkpoint_every=None)._progress == Progress(), (
            "nothing is to be written"
        )


def test_a_save_by_hand_fails_for_itself(tmp_path: Path) -> None:
    made = run(tmp_path, checkpoint_every=None)
    with (
        small_files(),
        pytest.raises(ConfigError, match=r"could not be written to .* \(mine: .*File too large"),
    ):
        made.save("mine")
    made.save("mine")
    assert list(verify(open_folder(tmp_path / "mine"))) == []

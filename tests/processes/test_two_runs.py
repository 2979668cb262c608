"""Two runs in one checkpoint folder: the second is refused while the first lives, and goes on once it is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from commands import DEADLINE, finish, python, shoal, start, write

LONG = """
import pathlib, time
run = shoal.Run(**settings, checkpoint="kept", checkpoint_every=1)
part = pathlib.Path(f"part-{rank}")
part.write_text(str(os.getpid()))
part.rename(f"pid-{rank}")  # whole from the moment it is there
for step in run.steps(100000):
    time.sleep(0.05)
"""


def test_the_second_is_refused_and_a_killed_one_is_in_nobodys_way(tmp_path: Path) -> None:
    script = write(tmp_path, LONG)
    first = start(tmp_path, "-m", "shoal", "run", "--workers", "2", "--retries", "0", script)
    deadline = time.monotonic() + DEADLINE
    while len(list(tmp_path.glob("pid-*"))) < 2 or not (tmp_path / "kept" / "step-2").exists():
        assert first.poll() is None, first.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid = int((tmp_path / "pid-0").read_text())
    lock = json.loads((tmp_path / "kept" / ".lock").read_text())
    assert lock["pid"] == pid
    second = shoal(tmp_path, "run", "--workers", "2", script)
    assert second.code == 2, second.err
    words = (
        rf"^shoal: \S+/kept is in use by process {pid} on \S+, since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC; "
        r"wait until that run has ended, stop it, or choose another checkpoint folder\.$"
    )
    told = [line for line in second.err.splitlines() if line.startswith("shoal")]
    assert len(told) == 1, second.err
    assert re.match(words, told[0]), second.err
    assert "Traceback" not in second.err
    assert first.poll() is None, "the first is not disturbed"
    for rank in range(2):
        with suppress(ProcessLookupError):  # the launcher may have ended the second once the first was gone
            os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)
    assert finish(first).code == 128 + signal.SIGKILL
    assert (tmp_path / "kept" / ".lock").exists()
    again = shoal(tmp_path, "run", "--steps", "1", script)
    assert again.code == 0, again.err
    assert f"kept was in use by process {pid} on" in again.err
    assert "which is gone; this run takes over its lock." in again.err
    assert "nothing left to do" in again.err
    assert not (tmp_path / "kept" / ".lock").exists()


def test_twelve_that_were_kept_stay(tmp_path: Path) -> None:
    """A resume without checkpoint_keep: only what it saves itself goes, and both are said once."""
    text = "for _ in shoal.Run(**settings, checkpoint='kept', checkpoint_every=1{}).steps({}):\n    pass\n"
    kept = tmp_path / "kept"

    def steps() -> set[int]:
        return {int(path.name[5:]) for path in kept.glob("step-*")}

    write(tmp_path, text.format(", checkpoint_keep=None", 12))
    assert python(tmp_path, "train.py").code == 0
    assert steps() == set(range(1, 13))
    write(tmp_path, text.format("", 20))
    done = python(tmp_path, "train.py")
    assert done.code == 0, done.err
    assert steps() == {*range(1, 13), 18, 19, 20}
    told = done.err.splitlines()
    assert told[0] == (
        f"shoal: {kept} has 12 checkpoints that were saved under another retention than checkpoint_keep=3: they stay "
        "until you remove them, as with shoal ckpt prune."
    )
    assert told[1] == (
        f"shoal: checkpoint_keep=3 removes step-13 from {kept} now, and from here on one for each new one; "
        "checkpoint_keep=None keeps all."
    )
    assert len(told) == 2
    write(tmp_path, text.format("", 22))
    assert python(tmp_path, "train.py").code == 0
    assert steps() == {*range(1, 13), 20, 21, 22}, "its own of an earlier life go on counting"
    prune = shoal(tmp_path, "ckpt", "prune", "kept", "--keep", "3", "--yes")
    assert prune.code == 0, prune.err
    assert steps() == {20, 21, 22}

"""`shoal selftest` on CPUs: all of it, what it says where something fails or hangs, and several hosts."""

from __future__ import annotations

import json
import pickle
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import commands
import pytest
import torch

from shoal.compress.int8 import Bytes
from shoal.cost import Cost
from shoal.exchange import TABLE as EXCHANGES
from shoal.exchange.reduce.reducer import Plain
from shoal.selftest import checkpoints, collectives, memory, strategies
from shoal.selftest.drive import Found
from shoal.selftest.kinds import KINDS
from shoal.selftest.report import table_rows, verdict
from shoal.selftest.row import Answer
from shoal.testing.spawn import spawn
from shoal.train.state.checkpoints import Checkpoints
from shoal.world.buckets import Bucket
from shoal.world.world import DONE, Handle, World

SLOW = 150.0


def run(folder: Path, *args: str) -> commands.Done:
    process = commands.start(folder, "-m", "shoal", "selftest", "--device", "cpu", *args)
    out, err = process.communicate(timeout=SLOW)
    assert process.returncode is not None
    return commands.Done(process.returncode, out, err, 0.0)


@pytest.mark.timeout(SLOW + 30)
def test_everything_on_two_workers(tmp_path: Path) -> None:
    done = run(tmp_path, "--workers", "2")
    assert done.code == 0, done.out + done.err
    found = json.loads((tmp_path / "shoal-selftest.json").read_text())
    rows = {(row["kind"], row["subject"]): row for row in found["rows"]}
    assert {kind for kind, _ in rows} == set(KINDS)
    assert all(
        any(kind == "strategies" and subject.startswith(name) for kind, subject in rows)
        for name in EXCHANGES
        if name != "solo"
    )
    left = {subject: row["said"] for (_, subject), row in rows.items() if row["verdict"] == "left out"}
    assert set(left) == {"ps", "zero1 * tp2 * pp2(microbatches=2, split=blocks.2)"}, left
    assert (
        "needs a multiple of 4 workers; you have 2"
        in left["zero1 * tp2 * pp2(microbatches=2, split=blocks.2)"]
    )
    assert rows["strategies", "zero3"]["said"].startswith("equals one process to ")
    assert rows["strategies", "ps"]["verdict"] == "ok"
    assert (
        rows["memory", "zero3"]["numbers"]["optimizer held"]
        < 0.6 * rows["memory", "ddp"]["numbers"]["optimizer held"]
    )
    assert rows["collectives", "all_reduce of 16 MB"]["numbers"]["seconds of torch"] > 0
    assert done.out.splitlines()[-2] == found["verdict"]
    assert found["verdict"].startswith("PASSED: ")
    assert len([line for line in done.err.splitlines() if ": ok, " in line]) >= 40, (
        "progress is shown while it runs"
    )
    assert socket.gethostname() not in (tmp_path / "shoal-selftest.json").read_text()


BROKEN = """
import os, signal, sys, time
from pathlib import Path
from shoal.errors import ConfigError
from shoal.selftest import worker
from shoal.selftest.checks import Check
from shoal.selftest.row import Answer

def run(world, subject):
    if subject == "refused":
        raise ConfigError("there is no such thing here.")
    if world.rank == 1 and subject == "wrong":
        return Answer(False, "0.5 and not 0.25")
    if world.rank == 1 and subject == "raises":
        raise RuntimeError("a bad day")
    if world.rank == 1 and subject == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 1 and subject == "hangs":
        time.sleep(1000)
    return Answer(True, "fine")

worker.LIMIT = 4.0
names = ["good", "refused", "wrong", "raises", "dies", "hangs", "good again"]
worker.checks = lambda folder: {"strategies": Check(names, run)}
worker.work(Path(sys.argv[1]))
"""


EXAMINE = """
import pickle
from pathlib import Path
from shoal.selftest import drive

drive.SCRIPT = "broken.py"
found = drive.examine(drive.Request("cpu", 2, kinds=("strategies",)), Path("inbox"), 2)
Path("found").write_bytes(pickle.dumps(found))
"""


@pytest.mark.timeout(SLOW + 30)
def test_what_fails_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "examine.py").write_text(EXAMINE)
    (tmp_path / "inbox").mkdir()
    # In a process with one thread, as `shoal selftest` is: workers are forked from it.
    done = commands.finish(commands.start(tmp_path, "examine.py"), SLOW)
    assert done.code == 0, done.err
    found: Found = pickle.loads((tmp_path / "found").read_bytes())
    said = {row.subject: (row.verdict, row.said) for row in found.rows}
    assert said["good"] == said["good again"] == ("ok", "fine")
    assert said["refused"] == ("left out", "there is no such thing here.")
    assert said["wrong"] == ("failed", "0.5 and not 0.25")
    assert said["raises"][0] == "failed"
    assert "a bad day" in said["raises"][1]
    assert said["dies"][0] == "failed"
    assert "SIGKILL" in said["dies"][1]
    assert said["hangs"][0] == "failed"
    assert len(found.rows) == 7
    assert verdict(found, 1.0).startswith("FAILED: 4 of 7 checks failed, with 2 workers")
    assert [row[1] for row in table_rows(found.rows)[1:]] == list(said)


def spoilt(world: World, folder: str) -> dict[str, tuple[bool, bool]]:
    """Whether each kind of check is content as things are, and with something spoilt."""

    def off(reducer: Plain, bucket: Bucket, vector: torch.Tensor) -> Handle:
        del bucket
        return reducer._world.all_reduce(vector.add_(0.01))

    def silent(code: Bytes, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
        del code, packed, scales
        out.zero_()

    flat = "ddp(bucket_mb=0.002)"
    hand_over = partial(checkpoints.hand_over, Path(folder))
    cases: dict[str, tuple[Callable[[World, str], Answer], str, Any, str, Any]] = {
        "sums": (strategies.compare, flat, Plain, "all_reduce", off),
        "compressor": (strategies.compare, "ddp + int8", Bytes, "unpack", silent),
        "memory": (memory.compare, "ddp", memory, "cost_of", lambda *_: Cost({"gradients": 1})),
        "checkpoint": (hand_over, flat, Checkpoints, "take_over", lambda *_: None),
        "collective": (collectives.measure, "all_gather of 4 KB", World, "all_gather", lambda *_: DONE),
    }
    found = {}
    for name, (check, subject, where, what, instead) in cases.items():
        sound = check(world, subject).good
        with mock.patch.object(where, what, instead):
            found[name] = sound, check(world, subject).good
    return found


def test_each_check_sees_what_is_wrong(tmp_path: Path) -> None:
    for found in spawn(spoilt, 2, str(tmp_path)):
        assert found == dict.fromkeys(found, (True, False))


def test_what_cannot_be_had_is_refused_in_a_sentence(tmp_path: Path) -> None:
    assert "--only speed: it is one of collectives, " in run(tmp_path, "--only", "speed").err
    nowhere = run(tmp_path, "--report", "nowhere/file.json")
    assert nowhere.code == 2
    assert "there is no folder nowhere" in nowhere.err
    done = commands.shoal(tmp_path, "selftest", "--device", "cuda", "--only", "memory")
    assert done.code == 2, done.out + done.err
    assert "device 'cuda' is not to be had here" in done.err
    assert "Traceback" not in done.err


@pytest.mark.timeout(SLOW)
def test_several_hosts(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shape = ("--hosts", "2", "--workers", "1", "--at", f"127.0.0.1:{port}")
    kinds = ("--only", "collectives", "--only", "checkpoints", "--only", "lost worker")
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    started = [
        commands.start(
            folder, "-m", "shoal", "selftest", "--device", "cpu", *shape, "--host", str(number), *kinds
        )
        for number, folder in enumerate(folders)
    ]
    (out, err), (other, _) = [process.communicate(timeout=SLOW) for process in started]
    assert [process.returncode for process in started] == [0, 0], out + err
    assert other == "host 1 is done; host 0 has the table.\n"
    rows = json.loads((folders[0] / "shoal-selftest.json").read_text())["rows"]
    assert {row["verdict"] for row in rows if row["kind"] == "collectives"} == {"ok"}
    why = {row["said"] for row in rows if row["kind"] != "collectives"}
    assert why == {
        "hosts have no folder in common that is known here; not tried with several hosts.",
        "started on one host only; run `shoal selftest` without --hosts on one of them.",
    }

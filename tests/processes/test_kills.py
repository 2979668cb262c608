"""Many times kill -9 while two workers save: what was committed is there, whole, and the newest is found."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.parametrize("kills", [60, pytest.param(200, marks=pytest.mark.all_only)])
def test_kills_while_saving(tmp_path: Path, kills: int) -> None:
    """One process imports torch and forks all workers, which is 200 times faster than starting them anew."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(kills)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == kills
    torn = [line for line in lines if "torn" in line]
    assert len(torn) > kills // 10, (
        f"only {len(torn)} kills came in the middle of a save: this proves too little"
    )


def main(root: Path, kills: int) -> None:
    import torch.distributed  # noqa: F401 before the forks

    from shoal.checkpoint import load, save  # noqa: F401
    from shoal.checkpoint.copies import find_newest  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    draws = random.Random(1)
    committed = 0
    for kill in range(kills):
        told, tell = os.pipe()
        store = root / f"store-{kill}"
        pids = [start(rank, store, root / "run", committed, tell) for rank in range(2)]
        os.close(tell)
        committed = watch(told, committed, draws.uniform(0.0, 0.05))
        for pid in draws.sample(pids, 2):
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        committed = watch(told, committed, 0.0)  # what was said before the kill counts too
        os.close(told)
        torn = sum(1 for entry in (root / "run").iterdir() if entry.name.startswith(".step"))
        committed = check(root / "run", committed)
        print(f"kill {kill}: step {committed}{' torn' if torn else ''}", flush=True)


def start(rank: int, store: Path, root: Path, begin: int, tell: int) -> int:
    """A worker that saves one step after the other until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    import torch
    import torch.distributed as dist

    from shoal.checkpoint.copies.keep import Keep, prune
    from shoal.checkpoint.folder import clean
    from shoal.checkpoint.reports import Facts
    from shoal.checkpoint.save import Saver
    from shoal.world.world import World

    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    world = World(rank, 2, torch.device("cpu"), ["here"] * 2, group=dist.group.WORLD)
    if rank == 0 and root.exists():
        clean(root)
    world.barrier()
    saver = Saver(world, root, lambda folder: prune(folder.parent, Keep(2), set()))
    for step in range(begin + 1, begin + 10_000):
        saver.save(state_at(step, rank), Facts(f"step-{step}", step, "test", {}))
        saver.wait()
        if rank == 0:
            os.write(tell, f"{step}\n".encode())
    os._exit(0)


def state_at(step: int, rank: int) -> list[object]:
    """Some that both hold, and some that only one does; every number is the step's."""
    import torch

    from shoal.checkpoint.layout.region import Region
    from shoal.checkpoint.layout.write_plan import Holding

    whole = Region.whole((300_000,))
    shared = torch.full((300_000,), float(step))
    mine = torch.full((50_000,), float(step))
    return [
        (Holding("parameter/w", whole, shared.dtype), shared),
        (
            Holding(
                "optimizer/m/w",
                Region.whole((100_000,)).within(50_000 * rank, 50_000 * (rank + 1)),
                mine.dtype,
            ),
            mine,
        ),
    ]


def watch(told: int, committed: int, seconds: float) -> int:
    """The last step that was said to be on disk, after the first of this life and some time more."""
    first = seconds > 0
    end = time.monotonic() + (30 if first else 0)
    text = b""
    while True:
        ready, _, _ = select.select([told], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            break
        more = os.read(told, 4096)
        if not more:
            break
        text += more
        if first:
            first, end = False, time.monotonic() + seconds
    return max([committed, *(int(line) for line in text.split())])


def check(root: Path, committed: int) -> int:
    from shoal.checkpoint.copies.find_newest import LocalFolder, find_whole
    from shoal.checkpoint.load import Reader
    from shoal.world.world import World

    found = find_whole(World.alone(), [LocalFolder(World.alone(), root)])
    assert found is not None
    assert found.manifest is not None
    assert found.manifest.step >= committed, (
        f"step {committed} was committed, and {found.manifest.step} is found"
    )
    reader = Reader.of(found)
    for path in ("parameter/w", "optimizer/m/w"):
        values = reader.read(path)
        assert (values == float(found.manifest.step)).all(), f"{path} is not of step {found.manifest.step}"
    reader.close()
    return found.manifest.step


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

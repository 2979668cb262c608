"""Copies in the memory of hosts: a job that was killed goes on from them, and so does one that has lost a host."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from commands import losses, python, shoal, write

import shoal.checkpoint.save as save_module
from shoal.checkpoint.copies.find_newest import LocalFolder, find_whole
from shoal.checkpoint.copies.peers import MEMORY, Peers, shared_memory
from shoal.checkpoint.folder import look
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.write_plan import Holding
from shoal.checkpoint.load import Reader
from shoal.checkpoint.reports import Facts
from shoal.checkpoint.save import Saver
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError
from shoal.testing.spawn import spawn
from shoal.world.world import World


def lose_a_host(world: World, folder: str, lost: str) -> tuple[int, bool, list[str]]:
    """Save twice, lose a host's memory and the disk; the step found, whether the numbers are right, what is left."""
    root, memory = Path(folder) / "disk", Path(folder) / "memory"
    memory.mkdir(exist_ok=True)
    peers = Peers(world, shared_memory(world, root, memory))
    saver = Saver(world, root, peers=peers)
    whole = Region.whole((world.size * 1000,))
    for step in (1, 2):
        mine = torch.full((1000,), float(10 * step + world.rank))
        region = whole.within(1000 * world.rank, 1000 * (world.rank + 1))
        saver.save(
            [(Holding("parameter/w", region, mine.dtype), mine)], Facts(f"step-{step}", step, "test", {})
        )
    saver.wait()
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(root)
    if world.hosts[world.rank].startswith(lost) and peers._leads:
        shutil.rmtree(peers._root)
    world.barrier()
    again = Peers(world, shared_memory(world, root, memory))
    found = find_whole(world, [LocalFolder(world, root), again])
    assert found is not None
    assert found.manifest is not None
    right = torch.equal(
        Reader.of(found).read("parameter/w"), torch.arange(world.size).repeat_interleave(1000) + 20.0
    )
    problems = list(verify(found))
    world.barrier()
    again.close()
    world.barrier()
    left = [str(p) for p in memory.rglob("*") if p.is_file()]
    return found.manifest.step, right, problems + left


@pytest.mark.parametrize(("workers", "lost"), [(2, "host-1"), (4, "host-0"), (2, "nobody")])
def test_a_lost_host_is_made_up_for_by_its_neighbour(tmp_path: Path, workers: int, lost: str) -> None:
    hosts = [f"host-{rank * 2 // workers}" for rank in range(workers)]
    for step, right, left in spawn(lose_a_host, workers, str(tmp_path), lost, hosts=hosts):
        assert (step, right, left) == (2, True, [])


def fail_once(world: World, folder: str) -> tuple[str, list[int], int]:
    """One host's disk is full at one save: what it hears, which steps are on disk, and the step in its memory."""
    root, memory = Path(folder) / "disk", Path(folder) / f"memory-{world.rank}"
    memory.mkdir()
    peers = Peers(world, shared_memory(world, root, memory))
    saver = Saver(world, root, peers=peers)
    whole = Region.whole((2000,))
    mine = torch.full((1000,), float(world.rank))
    held = [
        (Holding("parameter/w", whole.within(1000 * world.rank, 1000 * (world.rank + 1)), mine.dtype), mine)
    ]
    real = save_module.write_block

    def full(path: Path, _: memoryview) -> None:
        raise OSError(28, "No space left on device", str(path))

    said = ""
    for step in (1, 2, 3):
        save_module.write_block = full if world.rank == 1 and step == 2 else real
        saver.save(held, Facts(f"step-{step}", step, "test", {}))
        try:
            saver.rest()
        except ConfigError as error:
            said = str(error)
        world.barrier()
        if step == 2:
            inside = look(peers._root)[0].manifest
            assert inside is not None
            assert inside.step == 1, "the copy in memory is of the last that was written"
    inside = look(peers._root)[0].manifest
    assert inside is not None
    peers.close()
    return said, sorted(found.manifest.step for found in look(root) if found.manifest), inside.step


def test_a_disk_that_fails_leaves_no_neighbour_waiting(tmp_path: Path) -> None:
    for said, steps, inside in spawn(fail_once, 2, str(tmp_path), hosts=["left", "right"]):
        assert "No space left on device" in said
        assert (steps, inside) == ([1, 3], 3)


TRAIN = """
run = shoal.Run(**settings, precision="fp64", checkpoint="kept", checkpoint_every=3, copies="peer",
                accumulate=6 // int(os.environ.get("WORLD_SIZE", "1")))
for step in run.steps(12):
    if step.number == 11 and rank == 1 and os.path.exists("armed"):
        run._checkpoints.wait()
        os.kill(os.getpid(), 9)
"""


def test_a_killed_job_goes_on_from_memory(tmp_path: Path) -> None:
    own = MEMORY / f"shoal-{os.getuid()}"
    before = set(own.iterdir()) if own.exists() else set()
    script = write(tmp_path, TRAIN)
    assert python(tmp_path, script).code == 0
    wanted = losses(tmp_path)
    for folder in ("kept", "log"):
        shutil.rmtree(tmp_path / folder)
    (tmp_path / "armed").touch()
    done = shoal(tmp_path, "run", "--workers", "2", "--retries", "0", script)
    assert done.code == 128 + signal.SIGKILL, done.err
    assert len(set(own.iterdir()) - before) == 1, "the copy outlives the processes"
    (tmp_path / "armed").unlink()
    shutil.rmtree(tmp_path / "kept")
    done = shoal(tmp_path, "run", "--workers", "2", script)
    assert done.code == 0, done.err
    assert losses(tmp_path) == pytest.approx(wanted, rel=1e-10)
    assert set(own.iterdir()) - before == set(), "a run that ends in peace leaves no copies"


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"shoal-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="is not a folder of your own that nobody else can enter"):
        shared_memory(World.alone(), tmp_path / "run", tmp_path)

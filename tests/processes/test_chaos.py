"""Runs that are disturbed on a schedule end as undisturbed ones, and leave nothing behind."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from commands import Done, environment, finish, start, write

TRAIN = """
import time
net = lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
run = shoal.Run(**{**settings, "model": net})
for step in run.steps(30):
    time.sleep(0.005)
"""
STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "shared",
    "ddp * tp2",
    "ddp * pp2(microbatches=2)",
    "local(4)",
    "ps",
    "ps(ssp=2)",
)


def chaos(folder: Path, *options: str) -> Done:
    write(folder, TRAIN)
    environment(folder)
    return finish(
        start(folder, "-m", "shoal", "chaos", "--folder", "chaos", *options, "train.py"), timeout=170
    )


def rows(folder: Path, seed: int) -> dict[str, bool]:
    found = json.loads((folder / "chaos" / f"seed-{seed}" / "chaos.json").read_text())
    return {row["name"]: row["good"] for row in found["rows"]}


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one command use one undisturbed run."""
    return tmp_path_factory.mktemp("chaos")


@pytest.mark.parametrize(
    ("seed", "options"), [(1, ("--kills", "2")), (2, ("--kills", "1", "--stops", "1", "--delays", "1"))]
)
def test_kills_stops_and_delays_lose_nothing(
    shared_folder: Path, seed: int, options: tuple[str, ...]
) -> None:
    done = chaos(shared_folder, "--seed", str(seed), "--workers", "2", *options)
    assert done.code == 0, done.out + done.err
    assert "Nothing was lost" in done.out
    assert "equal to the bit" in done.out
    found = rows(shared_folder, seed)
    assert len(found) == 9
    assert all(found.values())


def test_servers_and_their_workers_lose_nothing(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--seed", "3", "--kills", "1", "--strategy", "ps", "--workers", "2")
    assert done.code == 0, done.out + done.err


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--seed", "3")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "nothing to do" in done.err
    done = chaos(tmp_path, "--fulls", "1")
    assert done.code == 2
    assert "--fulls" in done.err


@pytest.mark.all_only
def test_a_lost_launcher_and_the_same_command_again(tmp_path: Path) -> None:
    done = chaos(tmp_path, "--restarts", "2", "--kills", "1", "--checkpoint-every", "5", "--workers", "2")
    assert done.code == 0, done.out + done.err


@pytest.mark.all_only
def test_full_disks_and_cut_links(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root may make disks and networks")
    done = chaos(tmp_path, "--fulls", "2", "--checkpoint-every", "3", "--workers", "2")
    assert done.code == 0, done.out + done.err
    done = chaos(tmp_path, "--cuts", "2", "--kills", "2", "--workers", "2")
    assert done.code == 0, done.out + done.err


@pytest.mark.all_only
def test_a_schedule_is_replayed(shared_folder: Path) -> None:
    assert chaos(shared_folder, "--seed", "9", "--kills", "1", "--stops", "1", "--workers", "2").code == 0
    kept = shared_folder / "chaos" / "seed-9" / "schedule.json"
    copy = shared_folder / "copy.json"
    copy.write_text(kept.read_text())
    done = chaos(shared_folder, "--schedule", str(copy), "--workers", "2")
    assert done.code == 0, done.out + done.err
    assert kept.read_text() == copy.read_text()


@pytest.mark.all_only
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_hundred_seeds_over_all_strategies(tmp_path: Path, strategy: str) -> None:
    """CHAOS_SEEDS says how many of the 20 for each strategy."""
    for seed in range(int(os.environ.get("CHAOS_SEEDS", "20"))):
        faults = ("--kills", str(1 + seed % 3), "--stops", str(seed % 2), "--delays", str(seed // 2 % 2))
        done = chaos(tmp_path, "--seed", str(seed), *faults, "--strategy", strategy, "--workers", "4")
        assert done.code == 0, f"seed {seed}\n{done.out}{done.err}"

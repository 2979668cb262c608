"""One program in plain torch, with Shoal and with its peers: how many lines are others, and which numbers are.

The table in docs/guides/coming-from.md says what these tests show.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import socket
from contextlib import closing
from pathlib import Path

import pytest
import torch
from commands import finish
from warm import Command

PAIR = Path(__file__).parents[2] / "docs" / "coming-from"
PLAIN, WITH_SHOAL = PAIR / "plain.py", PAIR / "with_shoal.py"
SHOAL = ["-m", "shoal"]


PEERS = {
    "with_ddp.py": "torch",
    "with_accelerate.py": "accelerate",
    "with_fabric.py": "lightning",
    "with_lightning.py": "lightning",
    "with_trainer.py": "accelerate",
}
"""Programs, and what each needs."""
WEIGHS_RIGHT = ("with_trainer.py",)
"""Who divides by the labels of all workers, not by each worker's own."""


def start(folder: Path, *command: str, **variables: str) -> Command:
    """`python ...`, with nothing of a launcher in its environment."""
    clean = {k: v for k, v in os.environ.items() if not re.match(r"(SHOAL_|RANK$|WORLD_SIZE$|LOCAL_)", k)}
    return Command(folder, clean | {"OMP_NUM_THREADS": "1"} | variables, command)


def printed(process: Command) -> list[float]:
    """The losses that a program prints, and how often it was right."""
    done = finish(process)
    assert done.code == 0, f"{process.args} ended with {done.code}:\n{done.out}\n{done.err}"
    return [float(t) for t in re.findall(r"^(?:step \d+: loss|right:) ([\d.]+)$", done.out, re.MULTILINE)]


def numbers(folder: Path, *command: str) -> list[float]:
    return printed(start(folder, *command))


def together(folder: Path, workers: int, program: Path) -> list[float]:
    """As torchrun starts it, without the seconds that torchrun takes."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    ranks = [str(rank) for rank in range(workers)]
    processes = [start(folder, str(program), **job, RANK=rank, LOCAL_RANK=rank) for rank in ranks]
    try:
        first, *_ = [printed(process) for process in processes]
        return first
    finally:
        for process in processes:
            process.kill()


def with_unlabelled(folder: Path, program: Path) -> Path:
    """The same program for texts of which some have no label: workers then have unequal counts."""
    line = "self.rows.append((words, topic))"
    text = program.read_text()
    assert line in text
    changed = folder / program.name
    changed.write_text(
        text.replace(line, "self.rows.append((words, topic if draw.random() < 0.7 else -100))")
    )
    return changed


def needs(peer: str) -> None:
    if importlib.util.find_spec(PEERS[peer]) is None:
        pytest.skip(f"{PEERS[peer]} is not installed: scripts/setup peers")


def test_at_most_ten_lines_are_new() -> None:
    before, after = (file.read_text().splitlines() for file in (PLAIN, WITH_SHOAL))
    assert len(before) > 60
    new = [line for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    gone = [line for line in difflib.ndiff(before, after) if line.startswith("- ") and line[2:].strip()]
    print(f"{len(new)} new lines, {len(gone)} that are not needed any more")
    assert len(new) <= 10


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return numbers(tmp_path_factory.mktemp("plain"), str(PLAIN))


def test_both_compute_the_same(plain: list[float], tmp_path: Path) -> None:
    assert len(plain) == 37
    assert plain[-1] > 0.7
    assert numbers(tmp_path, str(WITH_SHOAL)) == pytest.approx(plain, abs=2e-5)
    two = numbers(tmp_path, *SHOAL, "run", "--workers", "2", str(WITH_SHOAL))
    assert two == pytest.approx(plain, abs=2e-5)


@pytest.fixture(scope="module")
def plain_unlabelled(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    return numbers(folder, str(with_unlabelled(folder, PLAIN)))


def but_by_default(run: str) -> list[object]:
    """All of them with `--all`, one by default: most of the time goes into imports of their packages."""
    return [name if name == run else pytest.param(name, marks=pytest.mark.all_only) for name in PEERS]


@pytest.mark.parametrize("peer", but_by_default("with_fabric.py"))
def test_peers_compute_the_same_alone(peer: str, plain: list[float], tmp_path: Path) -> None:
    needs(peer)
    assert together(tmp_path, 1, PAIR / peer) == pytest.approx(plain, abs=2e-5)


@pytest.mark.parametrize("peer", but_by_default("with_accelerate.py"))
def test_peers_compute_the_same_with_two_workers(peer: str, plain: list[float], tmp_path: Path) -> None:
    needs(peer)
    assert together(tmp_path, 2, PAIR / peer) == pytest.approx(plain, abs=2e-5)


@pytest.mark.parametrize("peer", but_by_default("with_ddp.py"))
def test_who_averages_over_workers(peer: str, plain_unlabelled: list[float], tmp_path: Path) -> None:
    """With unequal counts a mean of the workers' means is another number."""
    needs(peer)
    found = together(tmp_path, 2, with_unlabelled(tmp_path, PAIR / peer))
    assert len(found) == len(plain_unlabelled)
    same = found == pytest.approx(plain_unlabelled, abs=2e-5)
    assert same == (peer in WEIGHS_RIGHT), (found, plain_unlabelled)


def test_shoal_divides_by_the_labels_of_all(plain_unlabelled: list[float], tmp_path: Path) -> None:
    program = with_unlabelled(tmp_path, WITH_SHOAL)
    mean = 'F.cross_entropy(logits, batch["topic"])'
    assert mean in program.read_text()
    total = '(F.cross_entropy(logits, batch["topic"], reduction="sum"), (batch["topic"] >= 0).sum())'
    program.write_text(program.read_text().replace(mean, total))
    found = numbers(tmp_path, *SHOAL, "run", "--workers", "2", str(program))
    assert found == pytest.approx(plain_unlabelled, abs=2e-5)


@pytest.mark.parametrize("kind", ["torch", "accelerate"])
def test_samplers_repeat_samples(kind: str) -> None:
    """91 samples for 2 workers: one of them is seen twice."""
    if kind == "torch":
        sampler = torch.utils.data.DistributedSampler
        seen = [i for rank in range(2) for i in sampler(range(91), num_replicas=2, rank=rank, shuffle=False)]
    else:
        shard = pytest.importorskip("accelerate.data_loader", reason="scripts/setup peers").BatchSamplerShard
        whole = torch.utils.data.BatchSampler(range(91), 32, drop_last=False)
        parts = [shard(whole, num_processes=2, process_index=rank, split_batches=True) for rank in range(2)]
        seen = [i for part in parts for batch in part for i in batch]
    assert set(seen) == set(range(91))
    assert len(seen) > 91


def test_the_page_counts_the_lines() -> None:
    page = (PAIR.parent / "guides" / "coming-from.md").read_text()
    told = dict(re.findall(r"\(\.\./coming-from/(\w+\.py)\) \| (\d+) \|", page))
    before = PLAIN.read_text().splitlines()
    counted = {
        name: sum(
            line.startswith("+ ") and bool(line[2:].strip())
            for line in difflib.ndiff(before, (PAIR / name).read_text().splitlines())
        )
        for name in ("with_shoal.py", *PEERS)
    }
    assert {name: int(number) for name, number in told.items()} == counted

"""What a run says of itself: slow ranks, clocks that differ, numbers that are not finite, replicas that differ."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import environment, losses, python, shoal, write

from shoal.errors import ConfigError
from shoal.report.events import read_events
from shoal.testing.hosts import make_hosts


@pytest.fixture(autouse=True)
def _no_memory_of_faketime() -> Iterator[None]:
    """libfaketime leaves a segment of each process that ends at once."""
    before = set(Path("/dev/shm").glob("*faketime_*"))
    yield
    for file in set(Path("/dev/shm").glob("*faketime_*")) - before:
        file.unlink(missing_ok=True)


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [dict(e) for e in read_events(folder / "log" / "events.jsonl") if e.get("event") == kind]


SLOW = """
import time
def slow(output, batch):
    late = rank == 1 and (run.world.size < 3 or len(done) >= 9)
    time.sleep(0.080 if late else 0.050)
    return loss(output, batch)
done = []
run = shoal.Run(**{**settings, "loss": slow, "global_batch": 9})
for step in run.steps(29):
    done.append(step.number)
"""


def test_a_straggler_is_named_within_twenty_steps(tmp_path: Path) -> None:
    write(tmp_path, SLOW)
    done = shoal(tmp_path, "run", "--workers", "3", "train.py")
    assert done.code == 0, done.err
    said = [line for line in done.err.splitlines() if "slower than the others" in line]
    assert len(said) == 1, done.err
    assert "rank 1" in said[0]
    (event,) = events(tmp_path, "straggler")
    assert event["rank"] == 1
    assert 1.3 <= event["ratio"] < 2.5
    assert 9 < event["after"] <= 9 + 20


def test_ranks_that_wait_are_no_stragglers(tmp_path: Path) -> None:
    """The first rank's data take long; the others wait for it, and compute as fast as it does."""
    write(
        tmp_path,
        """
import time
class Slow:
    def __len__(self): return 26
    def __getitem__(self, i):
        time.sleep(0.002 if rank == 0 else 0.0)
        return data[i]
def steady(output, batch):
    time.sleep(0.01)
    return loss(output, batch)
run = shoal.Run(**{**settings, "loss": steady, "data": Slow()})
for step in run.steps(24):
    pass
""",
    )
    done = shoal(tmp_path, "run", "--workers", "2", "train.py")
    assert done.code == 0, done.err
    assert events(tmp_path, "straggler") == []


BAD = """
what = sys.argv[1]
class Data:
    def __len__(self): return 24
    def __getitem__(self, i):
        return (x[i] / 0 * 0 if what == "sample" and i == 13 else x[i]), y[i], torch.tensor(i)
def strange(output, batch):
    if what == "loss" and 13 in batch[2]:
        return output.sum() * float("nan"), len(batch[1])
    if what == "gradient" and 13 in batch[2]:  # the root of 0 is finite, and its slope is not
        output = output + 0 * torch.sqrt(run.module.scale - run.module.scale.detach())
    return F.cross_entropy(output, batch[1], reduction="sum"), len(batch[1])
more = dict(clip=1.0) if what == "gradient" else {}
run = shoal.Run(**{**settings, "data": Data(), "loss": strange, "shuffle": False, **more})
for step in run.steps(9):
    if what == "parameter" and step.number == 2:
        with torch.no_grad():
            run.module.last.weight.fill_(float("inf"))
"""


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (
            "sample",
            "it comes from rank 1, with samples 12, 13, 14, 15; sample 13 holds numbers that are not finite",
        ),
        ("loss", "it comes from rank 1, with samples 12, 13, 14, 15"),
        ("gradient", "it comes from rank 1, with samples 12, 13, 14, 15; first in the gradient of scale"),
        pytest.param(
            "parameter", "parameter last.weight is not finite on every rank", marks=pytest.mark.all_only
        ),
    ],
)
def test_what_is_not_finite_is_traced(tmp_path: Path, what: str, words: str) -> None:
    write(tmp_path, BAD)
    done = shoal(tmp_path, "run", "--workers", "2", "train.py", what)
    assert done.code == 2
    assert words in done.err, done.err
    assert done.err.count("not finite" if what != "loss" else "it comes from") <= 2, done.err
    assert "step 3" in done.err or "step 2" in done.err


def test_a_skipped_step_says_why(tmp_path: Path) -> None:
    write(tmp_path, BAD)
    done = shoal(tmp_path, "run", "--workers", "2", "--set", "on_nan=skip", "train.py", "sample")
    assert done.code == 0, done.err
    assert "is skipped: it comes from rank 1" in done.err
    assert "sample 13" in done.err


FLIP = """
run = shoal.Run(**{**settings, "global_batch": 9}, check_replicas=4)
for step in run.steps(9):
    if step.number == 3 and rank == run.world.size - 1 and sys.argv[1:] == ["flip"]:
        with torch.no_grad():  # one bit of one number
            run.module.first.weight.view(torch.int32)[2, 1] ^= 1 << 12
        state = run.optimizer.state
        first = next(iter(state))
        state[first]["exp_avg"].view(torch.int32).view(-1)[0] ^= 1 << 9
total = run.state_dict()
if rank == 0:
    import xxhash
    print("END", xxhash.xxh3_64_hexdigest(b"".join(t.numpy().tobytes() for t in total.values())))
"""


def test_a_flipped_bit_is_named_and_healed_from_the_majority(tmp_path: Path) -> None:
    write(tmp_path, FLIP)
    done = shoal(tmp_path, "run", "--workers", "3", "train.py", "flip")
    assert done.code == 0, done.err
    assert "rank 2 held other values of" in done.err, done.err
    found = events(tmp_path, "state_hash")
    assert [(e["after"], e["equal"]) for e in found] == [(4, False), (8, True)]
    assert found[0]["rank"] == 2


def test_without_a_majority_the_run_ends(tmp_path: Path) -> None:
    write(tmp_path, FLIP)
    done = shoal(tmp_path, "run", "--workers", "2", "train.py", "flip")
    assert done.code == 2
    assert "after step 4 ranks 0, 1 hold different values of" in done.err, done.err
    assert "Traceback" not in done.err
    assert [e["equal"] for e in events(tmp_path, "state_hash")] == [False]


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "ddp * pp2(microbatches=2)", "ddp + int8"])
@pytest.mark.all_only
def test_replicas_are_equal_under_every_strategy_that_has_them(tmp_path: Path, strategy: str) -> None:
    write(tmp_path, FLIP)
    done = shoal(tmp_path, "run", "--workers", "4", "--strategy", strategy, "train.py")
    assert done.code == 0, done.err
    assert [e["equal"] for e in events(tmp_path, "state_hash")] == [True, True]


STRATEGIES = ["zero3", *(pytest.param(s, marks=pytest.mark.all_only) for s in ("local(4)", "shared", "ps"))]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_without_replicas_refuse(tmp_path: Path, strategy: str) -> None:
    write(tmp_path, FLIP)
    done = shoal(tmp_path, "run", "--workers", "2", "--strategy", strategy, "train.py")
    assert done.code == 2
    assert f"check_replicas=4 under {strategy}" in done.err


@pytest.mark.all_only
def test_clocks_that_differ_are_shown_and_decide_nothing(tmp_path: Path) -> None:
    """The second host is 90 s ahead, and its clock runs twice as fast: the numbers are those of one host."""
    libraries = sorted(Path("/usr/lib").rglob("libfaketime.so.1"))
    if not libraries:
        pytest.skip("no `faketime` here; scripts/services installs it")
    shifted = {"LD_PRELOAD": str(libraries[0]), "FAKETIME": "+90s x2", "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    text = "run = shoal.Run(**settings)\nfor step in run.steps(9):\n    pass\n"
    alone, apart = tmp_path / "alone", tmp_path / "apart"
    for folder in (alone, apart):
        folder.mkdir()
        write(folder, text)
    assert shoal(alone, "run", "--workers", "2", "train.py").code == 0
    try:
        with make_hosts(2) as hosts:
            started = []
            for host, more in ((0, {}), (1, shifted)):
                options = ("--workers", "1", "--hosts", "2", "--host", str(host))
                words = [
                    sys.executable,
                    "-m",
                    "shoal",
                    "run",
                    *options,
                    "--at",
                    f"{hosts.addresses[0]}:29541",
                ]
                command = hosts.command(host, *words, "train.py")
                started.append(
                    subprocess.Popen(
                        command, cwd=apart, env=environment(apart) | more, text=True, stderr=subprocess.PIPE
                    )
                )
            said = [process.communicate(timeout=90)[1] for process in started]
    except ConfigError as error:
        pytest.skip(str(error))
    assert [process.returncode for process in started] == [0, 0], said
    assert losses(apart) == losses(alone)
    (clock,) = events(apart, "clock")
    assert clock["offset"] < -89
    assert clock["error"] < 1
    assert "s ahead of that of" in said[0]
    assert "s ahead of that of the first host" in python(apart, "-m", "shoal", "status", "log").out

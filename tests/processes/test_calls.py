"""Calls that belong to every rank, made on one or in another order: all ranks end, in one sentence that names both."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from commands import Done, finish, losses, start, torchrun, write

from shoal.train.calls.call import Call

TRAIN = """
import time
settings["model"] = lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
run = shoal.Run(**settings, checkpoint="saved", backend="{backend}", strategy="{strategy}")
for step in run.steps({steps}):
    print("at", time.time(), file=open("when", "w"), flush=True)
    if step.number == 3:
        {middle}
{end}
print("done", step.number)
"""


def program(
    folder: Path, strategy: str, middle: str, end: str = "", backend: str = "auto", steps: str = "6"
) -> str:
    """A script whose ranks do something after step 3, and after the loop."""
    folder.mkdir(exist_ok=True)
    return write(
        folder, TRAIN.format(strategy=strategy, middle=middle, end=end, backend=backend, steps=steps)
    )


def differ(folder: Path, done: Done, first: str, second: str, remedy: str = "call it on every rank") -> None:
    """All ranks have ended in one sentence, which names these two calls and the lines of the script they are in."""
    said = [line for line in done.err.splitlines() if line.startswith("shoal: ")]
    assert 'train.py", line' not in done.err, f"no traceback of the script: {done.err}"
    assert done.code != 0, done.err
    found = re.fullmatch(r"shoal: (?:rank 1: )?ranks make different calls: (.*), and (.*); (.*)\.", said[0])
    assert found, done.err
    lines = (folder / "train.py").read_text().splitlines()
    for phrase, wanted in zip(found.groups(), (first, second), strict=False):
        rank, call, code = wanted.split("|")
        assert phrase.startswith(f"{rank} {call}"), (phrase, wanted)
        if code:
            number = re.search(r"train\.py:(\d+)", phrase)
            assert number, phrase
            assert code in lines[int(number[1]) - 1], phrase
    assert found[3].startswith(remedy), found[3]
    late = done.ended - float((folder / "when").read_text().split()[1])
    assert late < 30.0, (
        f"it took {late:.1f} s; a busy machine may take its time, but nobody waits for a deadline"
    )


ONE = {
    "ddp": ("auto", "if rank == 0: run.evaluate(data)", "calls run.evaluate of 26 samples"),
    "zero3": ("auto", "if rank == 0: run.save('mine')", "calls run.save('mine')"),
    "ddp * tp2": ("auto", "if rank == 0: run.state_dict()", "calls run.state_dict"),
    "ddp * pp2(microbatches=2)": ("auto", "if rank == 0: run.evaluate(data)", "calls run.evaluate"),
    "shared": ("auto", "if rank == 0: run.save('mine')", "calls run.save('mine')"),
    "zero1": ("gloo", "if rank == 0: run.state_dict()", "calls run.state_dict"),
    "zero2": ("auto", "if rank == 0: run.gather(torch.ones(2))", "calls run.gather"),
    "local(4)": ("auto", "if rank == 0: run.evaluate(data)", "calls run.evaluate"),
}
"""By strategy: the backend, and what rank 0 does alone after step 3."""


def test_one_rank_calls_alone(tmp_path: Path) -> None:
    begun = []
    for number, (strategy, (backend, middle, call)) in enumerate(ONE.items()):
        folder = tmp_path / str(number)
        script = program(folder, strategy, middle, backend=backend)
        words = ("-m", "shoal", "run", "--no-dry-run", "--workers", "2", script)
        begun.append((folder, start(folder, *words), f"rank 0|{call}|{middle}"))  # they mostly wait
    for folder, process, first in begun:
        differ(folder, finish(process), first, "rank 1|has gone on to step 4|in run.steps")


ORDERS = {
    "if rank == 0: break": (
        "if rank == 0: run.evaluate(data)",
        "rank 0|calls run.evaluate|run.evaluate",
        "rank 1|has gone on to step 4|in run.steps",
    ),
    "if rank == 1: break": (
        "",
        "rank 0|has gone on to step 4|in run.steps",
        "rank 1|has ended its script after step 3|",
    ),
    "break": (
        "if rank == 0: run.evaluate(data)\nrun.save('a')\nif rank == 1: run.evaluate(data)",
        "rank 0|calls run.evaluate|run.evaluate",
        "rank 1|calls run.save('a')|run.save",
    ),
    "run.save('all')\n    if step.number == 6 and rank == 0: break": (
        "run.state_dict()",
        "rank 0|calls run.state_dict|run.state_dict",
        "rank 1|is at the end of run.steps|in run.steps",
    ),
}


def test_other_orders(tmp_path: Path) -> None:
    begun = []
    for number, (middle, (end, *words)) in enumerate(ORDERS.items()):
        folder = tmp_path / str(number)
        script = program(folder, "ddp", middle, end)
        begun.append((folder, start(folder, "-m", "shoal", "run", "--workers", "2", script), words))
    folder = tmp_path / "steps"
    script = program(folder, "ddp", "pass", steps="6 + rank")
    (folder / "when").write_text("at 0")
    process = start(folder, "-m", "shoal", "run", "--workers", "2", script)
    for place, other, (first, second) in begun:
        leaves = "has ended" in second or "at the end" in second
        differ(
            place, finish(other), first, second, "run the same number" if leaves else "call it on every rank"
        )
    done = finish(process)
    words = [f"rank {rank} calls run.steps({6 + rank}) at train.py:" for rank in (0, 1)]
    assert done.code == 2, done.err
    assert all(word in done.err for word in words), done.err


def test_under_torchrun_and_over_hosts(tmp_path: Path) -> None:
    script = program(tmp_path / "hosts", "ddp", "if rank == 0: run.evaluate(data)")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    words = ("-m", "shoal", "run", "--workers", "1", "--hosts", "2", "--at", f"127.0.0.1:{port}")
    hosts = [start(tmp_path / "hosts", *words, "--host", str(host), script) for host in range(2)]
    for host in hosts:
        first, second = "rank 0|calls run.evaluate|run.evaluate", "rank 1|has gone on to step 4|in run.steps"
        differ(tmp_path / "hosts", finish(host), first, second)
    folder = tmp_path / "torchrun"
    done = torchrun(folder, program(folder, "ddp", "if rank == 1: break"))
    first, second = "rank 0|has gone on to step 4|in run.steps", "rank 1|has ended its script|"
    differ(folder, done, first, second, "run the same number")


SLOW = """run.save('slow')
        if rank == 1: time.sleep(3.5)
        run.evaluate(data, {'zero': lambda output, batch: output.sum() * 0})
        if rank == 0: time.sleep(2)"""
AFTER = """
other = shoal.Run(**{**settings, "log": None})
for here, there in zip(other.steps(4), run.steps(9)):
    if here.number == 3:
        run.evaluate(data), other.state_dict()
if rank == 0: time.sleep(2)
run.state_dict()
if rank == 1: time.sleep(1)
"""


def test_slow_ranks_that_make_the_same_calls_are_left_alone(tmp_path: Path) -> None:
    strategies = ("ddp", "diloco(3, quorum=0.5, grace=0.1)")
    begun = []
    for number, strategy in enumerate(strategies):
        folder = tmp_path / str(number)
        script = program(folder, strategy, SLOW, AFTER)
        begun.append((folder, start(folder, "-m", "shoal", "run", "--workers", "2", script)))
    for _, process in begun:
        done = finish(process)
        assert (done.code, done.out, done.err) == (0, "done 6\n", "")
    assert len(losses(tmp_path / "0")) == 9


def test_a_quorum_meets_only_now_and_then(tmp_path: Path) -> None:
    script = program(tmp_path, "local(4, quorum=0.5, grace=0.1)", "run.evaluate(data)")
    done = finish(start(tmp_path, "-m", "shoal", "run", "--workers", "2", script))
    assert done.code == 2
    assert (
        "run.evaluate of 26 samples after step 3: with a quorum workers are at the same step only" in done.err
    )


CALL = Call(rank=0, number=3, rounds=(5, 2), step=5, what="run.evaluate", where="a.py:1")


@pytest.mark.parametrize(
    ("rounds", "number", "passed"),
    [
        ((5, 2), 2, None),  # on its way
        ((4, 2), 1, None),  # slow
        ((6, 2), 2, 0),  # a step too far
        ((5, 3), 2, 1),  # in the other Run
        ((6, 2), 3, None),  # it has made the call, and gone on
        ((5,), 2, None),  # the other Run is still to come
    ],
)
def test_what_proves_that_a_call_was_passed(rounds: tuple[int, ...], number: int, passed: int | None) -> None:
    assert CALL.passed_by(rounds, number) == passed

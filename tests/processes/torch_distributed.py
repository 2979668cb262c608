"""Runs torch's own `DistributedTest`, as the installed wheel has it, on a backend of ours.

    python tests/processes/torch_distributed.py [--backend shoal] [--ranks 4] [names] [--seconds 60] [--leave-out names]

Prints one JSON line per test: its name, `passed`, `failed`, `hung` or `skipped`, its seconds, and what it said. Without
names it runs every test that torch does not skip for gloo on this machine.

Torch decides by the name of the backend which tests there are and what they check, so ours has a name that its module
takes for gloo's: it has to do whatever gloo does. Only in torch's lists of backends whose profiler events are
asynchronous it does not stand.

The module takes seconds to import. It is imported once, and the ranks of each test are forked from there: each test
has processes of its own, which one that hangs cannot spoil.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import imaginary_cards

GLOO = "gloo"
_ERROR = 10
"""With this a rank of torch's tests ends if an assertion has failed."""


class _InPlaceOfGloo(str):
    """The name of a backend that torch's module takes for gloo wherever it asks."""

    def __eq__(self, other: object) -> bool:
        return other == GLOO or str.__eq__(self, other) is True

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


class Outcome(NamedTuple):
    """What became of one test."""

    name: str
    verdict: str
    seconds: float
    said: str


def load(backend: str, ranks: int, folder: str) -> tuple[ModuleType, type[Any]]:
    """Torch's module, made to use `backend`, and the class that has all its tests."""
    os.environ |= {
        "BACKEND": GLOO,
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": folder,
        "INIT_METHOD": f"file://{folder}/store",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
    }
    import torch

    imaginary_cards.lift_skips()
    from torch.testing._internal.distributed import distributed_test as module

    from shoal.world.shm.backend import register_backend

    torch.set_num_threads(1)
    register_backend()
    setattr(module, "BACKEND", _InPlaceOfGloo(backend))  # noqa: B010  # a constant, for mypy
    tests = type("Tests", (module.TestDistBackend, module.DistributedTest._DistTestBase), {})
    return module, tests


def names_of(tests: type[Any]) -> list[str]:
    """Every test that torch does not skip before it starts."""
    names = sorted(name for name in dir(tests) if name.startswith("test_"))
    return [name for name in names if not getattr(getattr(tests, name), "__unittest_skip__", False)]


def _rank(module: ModuleType, tests: type[Any], name: str, rank: int, folder: str, said: Connection) -> None:
    """One rank of one test, in a process of its own."""
    with open(f"{folder}/rank{rank}", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    code = 1
    try:
        setattr(module, "INIT_METHOD", f"file://{folder}/again")  # noqa: B010
        os.environ["TEMP_DIR"] = folder
        module.Barrier.barrier_id = 0
        if imaginary_cards.asks_for_cards(getattr(tests, name)):
            imaginary_cards.enter(int(os.environ["WORLD_SIZE"]))
        tests._run(rank, name, f"{folder}/store", said)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(module: ModuleType, tests: type[Any], name: str, ranks: int, limit: float) -> Outcome:
    """Run one test on that many ranks; whoever is not done after `limit` seconds is killed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for inner in ("barrier", "test_dir", "init_dir"):  # as torch's setUp makes them
            Path(folder, inner).mkdir()
        pipes = [Pipe() for _ in range(ranks)]
        pids = []
        for rank, (_, theirs) in enumerate(pipes):
            pid = os.fork()
            if pid == 0:
                _rank(module, tests, name, rank, folder, theirs)
            pids.append(pid)
        for _, theirs in pipes:
            theirs.close()
        codes = _join(pids, begun + limit)
        said = "\n".join(_heard(ours, Path(folder, f"rank{rank}")) for rank, (ours, _) in enumerate(pipes))
    return Outcome(name, _verdict(module, name, codes), time.monotonic() - begun, said)


def _join(pids: Sequence[int], deadline: float) -> list[int | None]:
    """The exit code of each rank; None for those that had to be killed. One that fails ends the others soon."""
    codes: dict[int, int | None] = {}
    while len(codes) < len(pids) and time.monotonic() < deadline:
        for pid in pids:
            if pid not in codes and (status := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(status[1])
                if codes[pid] in (1, _ERROR):
                    deadline = min(deadline, time.monotonic() + 5)
        time.sleep(0.005)
    for pid in pids:
        if pid not in codes:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            codes[pid] = None
    return [codes[pid] for pid in pids]


def _heard(pipe: Connection, log: Path) -> str:
    said = ""
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll():
            said += pipe.recv()
    return said or log.read_text(errors="replace")[-3000:]


def _verdict(module: ModuleType, name: str, codes: Sequence[int | None]) -> str:
    if name == "test_ddp_has_finalized":  # torch does not look at its exit codes either
        return "passed"
    if _ERROR in codes or 1 in codes:
        return "failed"
    if None in codes:
        return "hung"
    if codes[0] in {skip.exit_code for skip in module.TEST_SKIPS.values()}:
        return "skipped"
    return "passed" if codes[0] == 0 else "failed"


def outcomes(
    backend: str, ranks: int, limit: float, names: Sequence[str], left_out: Sequence[str] = ()
) -> Iterator[Outcome]:
    """Each test in turn: those named, or all but those left out."""
    with tempfile.TemporaryDirectory() as folder:
        module, tests = load(backend, ranks, folder)
        for name in names or [name for name in names_of(tests) if name not in left_out]:
            yield run(module, tests, name, ranks, limit)


def main() -> int:
    parser = argparse.ArgumentParser(description="torch's DistributedTest on a backend of ours")
    parser.add_argument("--backend", default="shoal")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--leave-out", nargs="*", default=[])
    parser.add_argument("names", nargs="*")
    asked = parser.parse_args()
    fine = True
    for outcome in outcomes(asked.backend, asked.ranks, asked.seconds, asked.names, asked.leave_out):
        print(json.dumps(outcome._asdict()), flush=True)
        fine = fine and outcome.verdict in ("passed", "skipped")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())

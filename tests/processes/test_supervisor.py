"""Servers and workers as children of a process: their ends are told, and nothing of them is left."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cluster.watch import Crew, Interrupts
from shoal.errors import WorkerFailed

SCRIPT = """
import os, selectors, signal
from shoal.cluster.server_supervisor import ServerSupervisor
from shoal.server.transport.keys import JobKeys

selector = selectors.EpollSelector()
before = set(os.listdir("/proc/self/fd"))
watch = lambda descriptor, action: selector.register(descriptor, selectors.EVENT_READ, action)
made = ServerSupervisor("1", JobKeys.make(), watch, selector.unregister)
made.coordinate()
for slot in range(2):
    made.serve(slot)
victim = max(made._pids)
os.kill(victim, signal.SIGKILL)
for key, _ in selector.select(10):
    key.data()
print(len(made._pids), victim in made._pids)
made.close()
print(sorted(set(os.listdir("/proc/self/fd")) - before), len(selector.get_map()))
"""


def test_no_descriptor_is_left() -> None:
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert found.stdout.splitlines() == ["3 False", "[] 0"], found.stderr


@pytest.mark.parametrize("code", [0, 3])
def test_the_end_of_a_worker_is_told_however_it_ended(tmp_path: Path, code: int) -> None:
    told: list[int] = []
    with Interrupts() as interrupts:
        crew = Crew(str(tmp_path), 1, interrupts)
        crew.ended = told.append
        crew.add(5, subprocess.Popen([sys.executable, "-S", "-c", f"raise SystemExit({code})"]).pid, [])
        with contextlib.nullcontext() if code == 0 else pytest.raises(WorkerFailed):
            crew.watch(30.0)
        crew.close()
    assert told == [5]

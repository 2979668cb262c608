"""Servers as children of a process: nothing of them is left when they are closed."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, selectors, signal
from shoal.cluster.attendants import Attendants
from shoal.server.keys import JobKeys

selector = selectors.EpollSelector()
before = set(os.listdir("/proc/self/fd"))
watch = lambda descriptor, action: selector.register(descriptor, selectors.EVENT_READ, action)
made = Attendants("1", JobKeys.make(), watch, selector.unregister)
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

"""What the kernel says of a process: whether it is stopped, or on its way out."""

from __future__ import annotations

import signal
from pathlib import Path

_EXITING = 0x4
"""PF_EXITING of the kernel: set from the beginning of a process's end, while its memory is still being freed."""


def stopped_by(pid: int) -> str:
    """What has stopped a process, in words; empty if it is not stopped."""
    fields = _stat(pid)
    return {"T": "a signal (SIGSTOP or Ctrl-Z)", "t": "a debugger"}.get(fields[0], "") if fields else ""


def is_dying(pid: int) -> bool:
    """Whether a process has been killed and the kernel is not done with it; its memory may take seconds to free."""
    fields = _stat(pid)
    if not fields:
        return False
    if fields[0] in "ZX" or int(fields[6]) & _EXITING:
        return True
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd:", "ShdPnd:"))]
    return any(mask >> (signal.SIGKILL - 1) & 1 for mask in pending)


def cpu_ticks(pid: int) -> int:
    """How much of a processor a process has had, in ticks; it stays where it is while the process waits."""
    fields = _stat(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, group, session, terminal, its group, flags."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

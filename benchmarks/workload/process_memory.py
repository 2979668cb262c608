"""What a process holds, as the kernel counts it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


def proportional() -> int:
    """Bytes of this process, shared pages counted in equal parts to all who map them."""
    return _read("/proc/self/smaps_rollup", "Pss")


def resident(what: str, pid: int | None = None) -> int:
    """Bytes of a process: now (VmRSS), those of them that are shared (RssShmem), at most (VmHWM)."""
    return _read(f"/proc/{pid or 'self'}/status", what)


def _read(path: str, what: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"the kernel does not say {what} in {path}")


def settle() -> None:
    """Give back what is free: garbage to the allocator, and the allocator's own slack to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def warm_up() -> None:
    """Let torch take what it takes for its first model, whoever comes."""
    warm = torch.nn.Linear(8, 8)
    warm(torch.randn(2, 8)).sum().backward()
    torch.optim.AdamW(warm.parameters(), fused=True).step()
    settle()


def peak_since(act: Callable[[], object]) -> int:
    """The most that this process held while it did something."""
    Path("/proc/self/clear_refs").write_text("5")
    act()
    return resident("VmHWM")

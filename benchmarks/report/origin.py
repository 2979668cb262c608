"""Where and when something was measured: date, commit, torch, and the machine."""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "unknown"
_INSTRUCTIONS = {"avx512f": "AVX-512", "avx2": "AVX2"}
"""Flags of the kernel -> what people call them; the first that a processor has is named."""


@dataclass(frozen=True)
class Origin:
    """What is not known is said to be `unknown`."""

    date: str
    """As 2026-11-18."""
    commit: str
    """Short; with a + where files had been changed since."""
    torch: str
    machine: str
    """Processor, cores and memory, in words."""
    python: str = UNKNOWN

    def sentence(self) -> str:
        """
        >>> Origin("2026-11-06", "unknown", "2.13.0", "two cores, 24 GiB").sentence()
        'Measured on 6 November 2026 with torch 2.13.0, commit unknown: two cores, 24 GiB.'
        """
        day = date.fromisoformat(self.date)
        when = f"{day.day} {day:%B %Y}"
        return f"Measured on {when} with torch {self.torch}, commit {self.commit}: {self.machine}."


def find_origin() -> Origin:
    """Here and now."""
    return Origin(
        date.today().isoformat(), _commit(), version("torch"), _machine(), platform.python_version()
    )


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + ("+" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN  # an unpacked archive


def _machine() -> str:
    facts: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    except OSError:
        pass  # no Linux: say what Python knows
    flags = facts.get("flags", "").split()
    model = facts.get("model name") or platform.processor() or UNKNOWN
    special = next((word for flag, word in _INSTRUCTIONS.items() if flag in flags), "")
    kind = ", ".join(word for word in (model, platform.machine(), special) if word)
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores ({kind}), {psutil.virtual_memory().total / 2**30:.0f} GiB"

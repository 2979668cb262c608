"""What earlier jobs have left behind: processes, segments of shared memory, folders. Named, never removed."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import cast

import psutil

from shoal.doctor.finding import Check, Examination, Facts, Finding, Json, Request, Says, texts

MEMORY = Path("/dev/shm")
SHARED = re.compile(r"/memfd:shoal-|/shoal-[^/ ]+/(progress|store)")
"""What the workers of a job have mapped: memory that they share, and the page that their launcher reads."""
SEGMENT = re.compile(r"torch_(\d+)_\d+")
"""How torch calls the segments of its data loaders, after the process that made them."""
SHOWN = 4


def measure(_request: Request) -> Facts:
    return {
        "orphans": cast(list[Json], orphans()),
        "segments": cast(list[Json], segments()),
        "folders": cast(list[Json], folders()),
    }


def orphans() -> list[str]:
    """Workers and servers whose launcher is gone, and those that somebody has stopped."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid() or process.pid == os.getpid() or not _of_a_job(process.pid):
                continue
            if _lost(process):
                found.append(f"{process.pid} (no launcher)")
            elif process.status() == psutil.STATUS_STOPPED:
                found.append(f"{process.pid} (stopped)")
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


def _lost(process: psutil.Process) -> bool:
    """Whether whoever has started it is gone: then init has it, or a user's systemd.

    A launcher that was started in the background has no parent either, but a child that will remove its folder.
    """
    parent = process.parent()
    if parent is not None and parent.pid > 1 and parent.name() != "systemd":
        return False
    if parent is not None and any("python" in word or "shoal" in word for word in parent.cmdline()[:2]):
        return False  # a container, whose first process is the launcher
    return not any("shoal-remove" in child.cmdline() for child in process.children())


def _of_a_job(pid: int) -> bool:
    try:
        return SHARED.search(Path(f"/proc/{pid}/maps").read_text()) is not None
    except OSError:
        return False


def segments() -> list[str]:
    """Segments in /dev/shm of processes that are gone."""
    found = []
    for file in MEMORY.glob("torch_*"):
        match = SEGMENT.match(file.name)
        if match is not None and not psutil.pid_exists(int(match[1])):
            found.append(str(file))
    return sorted(found)


def folders() -> list[str]:
    """Private folders that nobody will remove: each has a process that waits to do so, see world/private_folder.py."""
    kept = set()
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if "shoal-remove" in words:
            kept.add(words[-1])
    found = []
    for folder in Path(tempfile.gettempdir()).glob("shoal-*"):
        ours = re.fullmatch(r"shoal-\w{8}", folder.name) and folder.stat().st_uid == os.getuid()
        if ours and folder.is_dir() and str(folder) not in kept:
            found.append(str(folder))
    return sorted(found)


def judge(seen: Examination) -> list[Finding]:
    says = Says("leftovers")
    for host, facts in seen.facts.items():
        found, lost, left = (texts(facts, name) for name in ("orphans", "segments", "folders"))
        if found:
            what = f"processes of an earlier job: {_listed(found)}"
            remedy = f"look at them, then `kill -9 {' '.join(each.split()[0] for each in found[:SHOWN])}`"
            says.warn(host, what, len(found), "processes", remedy)
        if lost:
            what = f"shared memory of processes that are gone: {_listed(lost)}"
            says.warn(host, what, len(lost), "segments", f"`rm {' '.join(lost[:SHOWN])}`")
        if left:
            what = f"temporary folders of an earlier job: {_listed(left)}"
            says.warn(host, what, len(left), "folders", f"`rm -r {' '.join(left[:SHOWN])}`")
        if says.nothing_bad(host):
            says.ok(host, "nothing of an earlier job", 0)
    return says.found


def _listed(words: list[str]) -> str:
    return ", ".join(words[:SHOWN]) + (f" and {len(words) - SHOWN} more" if len(words) > SHOWN else "")


LEFTOVERS = Check("No process, segment or folder of an earlier job is left.", measure, judge)

"""Disks: the checkpoint folder and the folder of temporary files can be written to, have room, and are fast."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, number, text

MB = 1e6
TRIAL = 64 << 20
BLOCK = 4 << 20
SECONDS = 2.0
"""A slow disk is measured with what it takes in this time."""
SLOW = 50 * MB
LITTLE = 1000 * MB
NOTHING = 64 * MB
TEMPORARY = 16 * MB


def measure(request: Request) -> Facts:
    folder = request.folder
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    found: Facts = {"folder": str(request.folder), "temporary": tempfile.gettempdir()}
    found |= {f"folder {name}": value for name, value in _try(folder, TRIAL).items()}
    found |= {
        f"temporary {name}": value for name, value in _try(Path(tempfile.gettempdir()), 1 << 16).items()
    }
    return found


def _try(folder: Path, most: int) -> Facts:
    """Write a file there, to the disk itself, and remove it."""
    facts = os.statvfs(folder)
    free, written = facts.f_bavail * facts.f_frsize, 0
    block, begun = os.urandom(min(BLOCK, most)), time.monotonic()
    try:
        file, name = tempfile.mkstemp(dir=folder, prefix=".shoal-doctor-")
        try:
            while written < min(most, free // 2) and time.monotonic() - begun < SECONDS:
                written += os.write(file, block)
                os.fsync(file)
        finally:
            os.close(file)
            os.unlink(name)
    except OSError as error:
        return {"trouble": error.strerror or str(error), "free": free, "speed": 0.0}
    return {"trouble": "", "free": free, "speed": written / (time.monotonic() - begun)}


def judge(seen: Examination) -> list[Finding]:
    says = Says("disk")
    for host, facts in seen.facts.items():
        free, speed = number(facts, "folder free"), number(facts, "folder speed")
        where = text(facts, "folder")
        if why := text(facts, "folder trouble"):
            what = f"the checkpoint folder {where} cannot be written to ({why})"
            says.fault(
                host, what, free, "bytes", "another --folder, its rights, or its mount (`mount`, `df`)"
            )
        elif free < NOTHING:
            what = f"the checkpoint folder {where} has {free / MB:.0f} MB free"
            says.fault(host, what, free, "bytes", "free some space, or another --folder")
        else:
            if free < LITTLE:
                what = f"the checkpoint folder {where} has {free / MB:.0f} MB free: a few checkpoints"
                says.warn(host, what, free, "bytes", "free some space, or checkpoint_keep=2")
            if speed < SLOW:
                what = f"the checkpoint folder {where} takes {speed / MB:.0f} MB/s"
                says.warn(host, what, speed, "bytes/s", "a local disk, and copies= for the slow one")
        why, left = text(facts, "temporary trouble"), number(facts, "temporary free")
        if why or left < TEMPORARY:
            said = f"cannot be written to ({why})" if why else f"has {left / MB:.0f} MB free"
            what = f"the folder of temporary files {text(facts, 'temporary')} {said}"
            says.fault(host, what, left, "bytes", "workers meet there: free some space, or set TMPDIR")
        if says.nothing_bad(host):
            says.ok(host, f"{where}: {free / 1e9:.0f} GB free, {speed / MB:.0f} MB/s", speed, "bytes/s")
    return says.found


DISK = Check(
    "The checkpoint folder and the temporary folder can be written to, with room and speed.", measure, judge
)

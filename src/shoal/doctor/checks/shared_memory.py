"""Shared memory: /dev/shm for data loaders and copies of checkpoints, anonymous files for workers of one host."""

from __future__ import annotations

import os
import tempfile

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, number, text

PLACE = "/dev/shm"
MB = 1e6
LITTLE = 256 * MB
"""Containers give 64 MB unless told otherwise, and data loaders with worker processes die of it."""
REMEDY = "a larger one: `docker run --shm-size=8g`, or `mount -o remount,size=8g /dev/shm`"
BYTES = 1 << 20


def measure(_request: Request) -> Facts:
    found: Facts = {"trouble": "", "size": 0, "free": 0, "anonymous": _anonymous()}
    try:
        facts = os.statvfs(PLACE)
        found |= {"size": facts.f_blocks * facts.f_frsize, "free": facts.f_bavail * facts.f_frsize}
        with tempfile.NamedTemporaryFile(dir=PLACE, prefix="shoal-doctor-") as file:
            file.write(b"0" * 4096)
    except OSError as error:
        found["trouble"] = error.strerror or str(error)
    return found


def _anonymous() -> str:
    """Why workers of one host cannot share memory; empty if they can: see world/shm/memory.py."""
    try:
        file = os.memfd_create("shoal-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(file, 0, BYTES)
            with open(f"/proc/{os.getpid()}/fd/{file}", "r+b"):
                return ""
        finally:
            os.close(file)
    except OSError as error:
        return error.strerror or str(error)


def judge(seen: Examination) -> list[Finding]:
    says = Says("shared-memory")
    for host, facts in seen.facts.items():
        free, why = number(facts, "free"), text(facts, "trouble")
        if text(facts, "anonymous"):
            what = f"workers cannot share memory ({text(facts, 'anonymous')}): they will use sockets"
            says.warn(
                host, what, None, "", "mount /proc, and let processes of one user open each other's files"
            )
        if why:
            says.fault(
                host, f"{PLACE} cannot be written to ({why})", free, "bytes", f"mount a tmpfs there: {REMEDY}"
            )
        elif free < LITTLE:
            what = f"{PLACE} has {free / MB:.0f} MB free of {number(facts, 'size') / MB:.0f} MB"
            says.warn(host, what, free, "bytes", f"{REMEDY}; or loader_workers=0 and no copies in memory")
        if says.nothing_bad(host):
            says.ok(host, f"{PLACE} has {free / 1e9:.1f} GB free", free, "bytes")
    return says.found


SHARED_MEMORY = Check("/dev/shm has room and can be written to; processes can share memory.", measure, judge)

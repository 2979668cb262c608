"""Clocks: Shoal decides nothing by them, but logs of hosts whose clocks differ cannot be laid side by side."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, number

APART_SECONDS = 0.1
FAR_SECONDS = 300.0
"""Kerberos and S3 refuse whoever is further off than this."""
OLDEST = 1_750_000_000.0
"""A moment before this program was written."""
FOLDER_SECONDS = 2.0
"""Some file systems keep whole seconds only."""
REMEDY = "set the clocks by NTP: `timedatectl set-ntp true`, or chrony"


def measure(request: Request) -> Facts:
    return {"now": time.time(), "folder ahead": _ahead(request.folder)}


def _ahead(folder: Path) -> float:
    """How far ahead of this host's clock that of a folder is, which may be on a file server; 0 where unknown."""
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    try:
        before = time.time()
        file, name = tempfile.mkstemp(dir=folder, prefix=".shoal-doctor-")
        try:
            os.write(file, b"0")
            stamp, after = os.fstat(file).st_mtime, time.time()
        finally:
            os.close(file)
            os.unlink(name)
    except OSError:
        return 0.0  # the check of disks says so
    return 0.0 if before - FOLDER_SECONDS <= stamp <= after + FOLDER_SECONDS else stamp - after


def judge(seen: Examination) -> list[Finding]:
    says = Says("clock")
    for host, facts in seen.facts.items():
        now, folder = number(facts, "now"), number(facts, "folder ahead")
        if now < OLDEST:
            days = time.strftime("%d %B %Y", time.gmtime(max(now, 0)))
            says.fault(host, f"it says {days}: certificates and S3 fail", now, "s", REMEDY)
        if folder:
            what = f"{_apart(-folder)} the clock of the checkpoint folder"
            says.warn(host, what, -folder, "s", REMEDY)
        skew = seen.skews.get(host)
        if skew is not None and abs(skew.seconds) > APART_SECONDS + skew.within:
            bad = says.fault if abs(skew.seconds) > FAR_SECONDS else says.warn
            what = f"{_apart(skew.seconds)} host 0, within {1000 * skew.within:.1f} ms"
            bad(host, what, skew.seconds, "s", REMEDY)
        if says.nothing_bad(host):
            said = "as that of the checkpoint folder" if skew is None else f"{_apart(skew.seconds)} host 0"
            says.ok(host, said, None if skew is None else skew.seconds, "s")
    return says.found


def _apart(seconds: float) -> str:
    """As words.

    >>> _apart(2.5), _apart(-0.0004)
    ('2.5 s ahead of', '0.40 ms behind')
    """
    size = abs(seconds)
    said = f"{size:.3g} s" if size >= 1 else f"{1000 * size:.2f} ms"
    return f"{said} {'ahead of' if seconds >= 0 else 'behind'}"


CLOCK = Check("Clocks agree with each other and with the checkpoint folder.", measure, judge)

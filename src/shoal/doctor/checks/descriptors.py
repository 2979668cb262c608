"""Limits of the user: open files and processes."""

from __future__ import annotations

import resource

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, number

OWN = 64
"""What Python, torch and a script have open."""
EACH = 8
"""More for each other worker: connections, pipes, pages."""
COMFORT = 1024
"""Data sets of many files, and trackers, open more than Shoal does."""


def measure(request: Request) -> Facts:
    return {
        "files": _limit(resource.RLIMIT_NOFILE),
        "most": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "processes": _limit(resource.RLIMIT_NPROC),
        "workers": request.workers,
    }


def _limit(kind: int) -> int:
    return resource.getrlimit(kind)[0]


def judge(seen: Examination) -> list[Finding]:
    says = Says("descriptors")
    everybody = sum(number(facts, "workers") for facts in seen.facts.values())
    for host, facts in seen.facts.items():
        files, most, processes = (number(facts, name) for name in ("files", "most", "processes"))
        needed = OWN + EACH * everybody
        enough = f"`ulimit -n {max(needed, 65536):.0f}`" + (
            " (root must allow it: /etc/security/limits.conf)" if 0 <= most < needed else ""
        )
        if 0 <= files < needed:
            what = f"a process may open {files:.0f} files, and {everybody:.0f} workers need {needed:.0f} each"
            says.fault(host, what, files, "files", enough)
        elif 0 <= files < COMFORT:
            what = f"a process may open {files:.0f} files: few for data sets of many files"
            says.warn(host, what, files, "files", enough)
        if 0 <= processes < 64 * number(facts, "workers"):
            what = f"the user may have {processes:.0f} processes and threads"
            says.warn(host, what, processes, "processes", "`ulimit -u 65536`")
        if says.nothing_bad(host):
            says.ok(
                host, f"a process may open {files:.0f} files" if files >= 0 else "no limit", files, "files"
            )
    return says.found


DESCRIPTORS = Check("A process may open enough files, and a user may have enough processes.", measure, judge)

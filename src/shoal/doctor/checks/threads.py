"""Threads against cores: workers that share a core wait for each other in every step."""

from __future__ import annotations

import os
from math import floor
from pathlib import Path

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, number, text

GROUPS = Path("/sys/fs/cgroup")


def measure(request: Request) -> Facts:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "quota": quota(),
        "omp": os.environ.get("OMP_NUM_THREADS", ""),
        "workers": request.workers,
    }


def quota(groups: Path = GROUPS) -> float:
    """Cores that the control group pays for; 0 if there is no limit."""
    for file in (groups / "cpu.max", groups / "cpu" / "cpu.cfs_quota_us"):
        try:
            words = file.read_text().split()
            period = words[1] if len(words) > 1 else (file.parent / "cpu.cfs_period_us").read_text()
            if words[0].isdigit():
                return int(words[0]) / int(period)
        except (OSError, IndexError, ValueError):
            continue
    return 0.0


def judge(seen: Examination) -> list[Finding]:
    says = Says("threads")
    for host, facts in seen.facts.items():
        cores, workers = number(facts, "cores"), number(facts, "workers")
        paid = number(facts, "quota")
        if 0 < paid < cores:
            what = f"the control group pays for {paid:.1f} of {cores:.0f} cores"
            says.warn(host, what, paid, "cores", f"--workers {max(1, floor(paid))}, or a larger quota")
        omp = text(facts, "omp")
        each = int(omp) if omp.isdigit() else 1
        if omp and not omp.isdigit():
            says.fault(host, f"OMP_NUM_THREADS={omp} is no number", None, "", "unset OMP_NUM_THREADS")
        elif workers > cores:
            what = f"{workers:.0f} workers on {cores:.0f} cores"
            says.warn(host, what, workers, "workers", f"--workers {cores:.0f}: each wants a core of its own")
        elif workers * each > cores:
            what = f"{workers:.0f} workers × OMP_NUM_THREADS={each} on {cores:.0f} cores"
            remedy = f"unset OMP_NUM_THREADS, or --threads {max(1, floor(cores / workers))}"
            says.warn(host, what, workers * each, "threads", remedy)
        if says.nothing_bad(host):
            each = each if omp else max(1, floor(cores / workers))
            what = f"{workers:.0f} workers × {each} threads on {cores:.0f} cores"
            says.ok(host, what, workers * each, "threads")
    return says.found


THREADS = Check("Workers and their threads have cores of their own.", measure, judge)

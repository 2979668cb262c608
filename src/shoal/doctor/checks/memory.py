"""Memory: of the host, of the control group around this process, and the limits of its user."""

from __future__ import annotations

import resource

import psutil

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, number
from shoal.world.free_memory import free_memory, limits

GB = 1e9
WORKER = 0.3 * GB
"""What a worker takes before it has a model: Python and torch, measured."""
ROOM = 1.0 * GB
"""With less for each worker only toys train."""
ADDRESSES = 0.7 * GB
"""Virtual memory of the same."""
FEW_ADDRESSES = 8 * GB
UNLIMITED = -1


def measure(request: Request) -> Facts:
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    found: Facts = {"free": free_memory(), "total": psutil.virtual_memory().total, "workers": request.workers}
    found["group"] = min(limits(), default=UNLIMITED)
    found["addresses"] = UNLIMITED if addresses == resource.RLIM_INFINITY else addresses
    return found


def judge(seen: Examination) -> list[Finding]:
    says = Says("memory")
    for host, facts in seen.facts.items():
        free, workers = number(facts, "free"), max(number(facts, "workers"), 1)
        group, total = number(facts, "group"), number(facts, "total")
        limited = f" (its control group may have {group / GB:.2f} GB)" if 0 <= group < total else ""
        what = f"{free / GB:.2f} GB are free{limited}"
        remedy = "a larger limit" if limited else "end what takes it (`top -o %MEM`)"
        if free < WORKER * workers:
            what += (
                f", and {workers:.0f} workers take {WORKER * workers / GB:.1f} GB before they have a model"
            )
            says.fault(host, what, free, "bytes", f"{remedy}, or fewer --workers")
        elif free < ROOM * workers:
            what += f", {free / workers / GB:.2f} GB for each of {workers:.0f} workers"
            says.warn(host, what, free, "bytes", f"{remedy}, or fewer --workers")
        addresses = number(facts, "addresses")
        if addresses != UNLIMITED and addresses < FEW_ADDRESSES:
            what = f"a process may have {addresses / GB:.2f} GB of addresses (ulimit -v)"
            bad = says.fault if addresses < ADDRESSES else says.warn
            bad(host, what, addresses, "bytes", "`ulimit -v unlimited`: torch reserves far more than it uses")
        if says.nothing_bad(host):
            says.ok(host, what, free, "bytes")
    return says.found


MEMORY = Check(
    "There is memory for the workers, within the limits of control group and user.", measure, judge
)

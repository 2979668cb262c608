"""Names: localhost, this host's own, and the one in --at lead where they should, and quickly."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress
from typing import cast

import psutil

from shoal.doctor.finding import Check, Examination, Facts, Finding, Json, Request, Says, number, text, texts
from shoal.doctor.meet import address_of

SLOW_SECONDS = 1.0
LOOK_UP_SECONDS = 6.0
HOSTS = "correct it in /etc/hosts, or in the name server"


def measure(request: Request) -> Facts:
    own = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    found: Facts = {"own": cast(list[Json], own), "hostname": socket.gethostname()}
    names = {"localhost": "localhost", "host": socket.gethostname()}
    if request.at:
        names["at"] = address_of(request.at)[0]
    for label, name in names.items():
        addresses, seconds = look_up(name)
        found |= {label: cast(list[Json], addresses), f"{label} seconds": seconds}
    return found


def look_up(name: str) -> tuple[list[str], float]:
    """The IPv4 addresses of a name, and how long it took; a name server that is silent is not waited for."""
    found: list[str] = []

    def ask() -> None:
        with suppress(OSError):
            found.extend(str(entry[4][0]) for entry in socket.getaddrinfo(name, None, socket.AF_INET))

    begun = time.monotonic()
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(LOOK_UP_SECONDS)
    return sorted(set(found)), time.monotonic() - begun


def judge(seen: Examination) -> list[Finding]:
    says = Says("names")
    for host, facts in seen.facts.items():
        _judge_one(seen, host, facts, says)
        if says.nothing_bad(host):
            says.ok(host, f"{text(facts, 'hostname')} is {', '.join(texts(facts, 'host'))}")
    return says.found


def _judge_one(seen: Examination, host: int, facts: Facts, says: Says) -> None:
    own, hostname = texts(facts, "own"), text(facts, "hostname")
    local, mine = texts(facts, "localhost"), texts(facts, "host")
    if not any(address.startswith("127.") for address in local):
        what = f"localhost is {_said(local)}"
        says.fault(host, what, None, "", "`127.0.0.1 localhost` belongs into /etc/hosts")
    if not mine:
        what = f"this host's name, {hostname}, is not known to itself"
        says.warn(host, what, None, "", f"a line `ADDRESS {hostname}` in /etc/hosts; torch looks it up")
    elif not any(address in own or address.startswith("127.") for address in mine):
        what = f"this host's name, {hostname}, leads to {_said(mine)}, which is another machine's address"
        says.fault(host, what, None, "", HOSTS)
    if "at" in facts:
        there = texts(facts, "at")
        at = address_of(seen.request.at)[0]
        if not there:
            says.fault(host, f"--at: the name {at} is not known", None, "", HOSTS)
        elif host == 0 and not any(address in own or address.startswith("127.") for address in there):
            what = f"--at: {at} is {_said(there)}, and host 0 has none of that"
            says.fault(host, what, None, "", f"give an address of host 0; {HOSTS}")
        elif 0 in seen.facts and there != texts(seen.facts[0], "at"):
            what = f"--at: {at} is {_said(there)} here, {_said(texts(seen.facts[0], 'at'))} on host 0"
            says.fault(host, what, None, "", HOSTS)
    for label in ("localhost", "host", "at"):
        seconds = number(facts, f"{label} seconds") if f"{label} seconds" in facts else 0.0
        if seconds > SLOW_SECONDS:
            name = {"localhost": "localhost", "host": hostname, "at": seen.request.at}[label]
            says.warn(
                host, f"looking up {name} takes {seconds:.1f} s", seconds, "s", f"put {name} into /etc/hosts"
            )


def _said(addresses: list[str]) -> str:
    return ", ".join(addresses) or "not known"


NAMES = Check("localhost, this host's name and that of host 0 lead where they should.", measure, judge)

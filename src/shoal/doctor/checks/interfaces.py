"""Network interfaces: loopback works, and the one that leads to the other hosts is up."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import psutil

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, number, text
from shoal.doctor.meet import address_of
from shoal.world.interfaces import interface_towards

SLOW_MTU = 1280


def measure(request: Request) -> Facts:
    found: Facts = {"loopback": _loopback(), "asked": os.environ.get("GLOO_SOCKET_IFNAME", "")}
    states = psutil.net_if_stats()
    asked = str(found["asked"])
    found["asked is"] = "missing" if asked and asked not in states else _state(asked) if asked else ""
    found["towards"] = ""
    if request.at:
        address, port = address_of(request.at)
        with suppress(OSError):
            name = interface_towards(address, port)
            found |= {"towards": name or "none", "mtu": states[name].mtu if name else 0}
            found["state"] = _state(name) if name else "missing"
    return found


def _state(name: str) -> str:
    return "up" if psutil.net_if_stats()[name].isup else "down"


def _loopback() -> str:
    """Empty if 127.0.0.1 answers."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=2),
        ):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def judge(seen: Examination) -> list[Finding]:
    says = Says("interfaces")
    sizes = {host: number(facts, "mtu") for host, facts in seen.facts.items() if "mtu" in facts}
    for host, facts in seen.facts.items():
        if text(facts, "loopback"):
            what = f"nothing can be reached at 127.0.0.1 ({text(facts, 'loopback')})"
            says.fault(host, what, None, "", "ip link set lo up: workers of one host meet there")
        asked = text(facts, "asked")
        if asked and text(facts, "asked is") != "up":
            what = f"GLOO_SOCKET_IFNAME={asked}, and that interface is {text(facts, 'asked is')}"
            says.fault(host, what, None, "", "unset GLOO_SOCKET_IFNAME, or name one of `ip -br addr`")
        if text(facts, "towards") and text(facts, "state") != "up":
            what = f"the interface towards {seen.request.at} ({text(facts, 'towards')}) is {text(facts, 'state')}"
            says.fault(
                host, what, None, "", "see `ip -br addr`; give --at an address of a network that is up"
            )
        if host in sizes and host > 0 and 0 in sizes and sizes[host] != sizes[0] and _outside(seen, host):
            what = f"packets of {sizes[host]:.0f} bytes here (MTU), {sizes[0]:.0f} on host 0"
            says.warn(host, what, sizes[host], "bytes", "the same MTU on every host: large messages may hang")
        if says.nothing_bad(host):
            used = text(facts, "towards")
            says.ok(host, f"lo and {used} are up" if used and used != "lo" else "lo is up")
    return says.found


def _outside(seen: Examination, host: int) -> bool:
    """Whether both host 0 and this one use a network: host 0 reaches its own address by loopback."""
    return "lo" not in (text(seen.facts[0], "towards"), text(seen.facts[host], "towards"))


INTERFACES = Check("Loopback answers, and the interface towards the other hosts is up.", measure, judge)

"""Ports: the one of --at is free, and there are ports left for the connections between workers."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import psutil

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, number, text
from shoal.doctor.meet import address_of

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FEW = 1000
"""Free ports that a host with many workers may want."""


def measure(request: Request) -> Facts:
    low, high = map(int, RANGE.read_text().split())
    used = {c.laddr.port for c in psutil.net_connections("tcp") if c.laddr and c.pid != os.getpid()}
    free = high - low + 1 - len([port for port in used if low <= port <= high])
    found: Facts = {"free": free, "trouble": "", "holder": ""}
    if request.at and request.host == 0:
        found["trouble"] = trouble(request.at)
        if found["trouble"]:
            found["holder"] = holder(address_of(request.at)[1])
    return found


def trouble(at: str) -> str:
    """Why host 0 cannot listen there; empty if it can."""
    address, port = address_of(at)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store itself does
            probe.bind((address, port))
            probe.listen()
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, "") or str(error)
    return ""


def holder(port: int) -> str:
    """The process that listens at a port, as far as we may see it."""
    for connection in psutil.net_connections("tcp"):
        listens = connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        if listens and connection.pid and connection.pid != os.getpid():
            try:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
            except psutil.Error:
                return f"pid {connection.pid}"
    return ""


def judge(seen: Examination) -> list[Finding]:
    says = Says("ports")
    for host, facts in seen.facts.items():
        why, at = text(facts, "trouble"), seen.request.at
        port = address_of(at)[1] if at else 0
        if why == "EADDRINUSE":
            who = text(facts, "holder") or "another program"
            what = f"{who} listens at {at} already"
            says.fault(host, what, port, "", "choose another port in --at, or end that program")
        elif why == "EADDRNOTAVAIL":
            remedy = "--at takes an address of host 0: see `ip -br addr` there"
            says.fault(host, f"{at} is no address of host 0", port, "", remedy)
        elif why == "EACCES":
            says.fault(
                host, f"only root may listen at port {port}", port, "", "a port from 1024 on, such as 29500"
            )
        elif why:
            says.fault(
                host, f"host 0 cannot listen at {at} ({why})", port, "", "choose another address or port"
            )
        free = number(facts, "free")
        if free < FEW:
            what = f"{free:.0f} ports are free for connections"
            says.warn(host, what, free, "ports", f"widen {RANGE}, or end what holds them (`ss -t`)")
        if says.nothing_bad(host):
            says.ok(host, f"{free:.0f} free" + (f"; {at} too" if at and host == 0 else ""), free, "ports")
    return says.found


PORTS = Check("The port of --at is free, and so are enough others.", measure, judge)

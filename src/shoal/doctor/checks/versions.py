"""Versions: the same everywhere, and such as Shoal was tried with."""

from __future__ import annotations

import platform
import re
from collections import Counter
from importlib import metadata

import shoal
from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says, text

MUST_AGREE = ("shoal", "torch", "python", "machine")
"""Hosts that differ in these do not understand each other, or compute different numbers."""
PACKAGES = ("torch", "numpy", "safetensors", "msgpack", "pyzmq")


def measure(_request: Request) -> Facts:
    found: Facts = {"shoal": shoal.__version__, "python": platform.python_version()}
    found |= {"machine": platform.machine(), "kernel": platform.release(), "libc": platform.libc_ver()[1]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    wanted = [word for word in metadata.requires("shoal") or [] if re.match(r"torch\W", word)]
    found["torch wanted"] = wanted[0].removeprefix("torch") if wanted else ""
    return found


def judge(seen: Examination) -> list[Finding]:
    says = Says("versions")
    for host, facts in seen.facts.items():
        for package in PACKAGES:
            if text(facts, package) == "not installed":
                what = f"{package} is not installed for {_short(text(facts, 'python'))}"
                says.fault(host, what, None, "", f"pip install {package}, or activate Shoal's environment")
        torch, wanted = text(facts, "torch"), text(facts, "torch wanted")
        if torch != "not installed" and not fits(torch, wanted):
            what = f"torch {torch} was never tried with this Shoal, which wants {wanted}"
            says.warn(host, what, None, "", f'pip install "torch{wanted}"')
    for name in ("shoal", "python", "torch", "machine", *PACKAGES[1:], "libc"):
        _compare(seen, name, says)
    for host, facts in seen.facts.items():
        if says.nothing_bad(host):
            says.ok(host, ", ".join(f"{name} {text(facts, name)}" for name in ("shoal", "torch", "python")))
    return says.found


def _compare(seen: Examination, name: str, says: Says) -> None:
    values = {host: text(facts, name) for host, facts in seen.facts.items()}
    if name == "python":
        values = {host: _short(value) for host, value in values.items()}
    usual, count = Counter(values.values()).most_common(1)[0]
    if count == len(values):
        return
    for host, value in values.items():
        if value != usual:
            what = f"{name} {value} here, {usual} on {_others(values, usual)}"
            remedy = f"install {name} {usual} on host {host}: the same on every host"
            (says.fault if name in MUST_AGREE else says.warn)(host, what, None, "", remedy)


def _others(values: dict[int, str], usual: str) -> str:
    hosts = [host for host, value in values.items() if value == usual]
    return f"host {hosts[0]}" if len(hosts) == 1 else f"{len(hosts)} other hosts"


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])


def fits(version: str, wanted: str) -> bool:
    """Whether a version lies within bounds such as ">=2.13,<2.14".

    >>> fits("2.13.0+cpu", ">=2.13,<2.14"), fits("2.14.1", ">=2.13,<2.14"), fits("2.9", "")
    (True, False, True)
    """
    mine = _parts(version)
    for sign, bound in re.findall(r"(>=|<)([\d.]+)", wanted):
        limit = _parts(bound)
        if (mine < limit) if sign == ">=" else (mine >= limit):
            return False
    return True


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part]  # type: ignore[index]


VERSIONS = Check("Python, torch and Shoal are there, fit, and are the same on every host.", measure, judge)

"""The doctor's table, its verdict, and the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.doctor.checks.links import rate
from shoal.doctor.drive import Diagnosis
from shoal.doctor.finding import Finding, Level, Link

WORDS = {Level.OK: ("ok", "green"), Level.WARNING: ("warning", "yellow"), Level.FAULT: ("FAULT", "bold red")}
FORMAT = 1


def draw(diagnosis: Diagnosis, console: Console) -> None:
    """One table of findings; with several hosts one more, of each pair."""
    several = diagnosis.hosts > 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("check", *(["host"] if several else []), "", "found", "remedy"):
        table.add_column(Text(name), ratio=None if name in ("check", "host", "") else 1)
    for found, hosts in _merged(diagnosis.findings, diagnosis.hosts):
        word, style = WORDS[found.level]
        cells = [found.check, *([hosts] if several else [])]
        # Text, never markup: names come from other hosts.
        table.add_row(
            *map(Text, cells), Text(word, style=style), Text(plain(found.what)), Text(plain(found.remedy))
        )
    console.print(table)
    if several and diagnosis.links:
        console.print()
        console.print(_pairs(diagnosis.links))


def _merged(findings: Sequence[Finding], hosts: int) -> list[tuple[Finding, str]]:
    """Hosts on which nothing is wrong share a line."""
    rows: list[tuple[Finding, str]] = []
    for _, group in groupby(findings, key=lambda found: found.check):
        of_check = list(group)
        good = [found for found in of_check if found.level is Level.OK]
        if good:
            alike = len({found.what for found in good}) == 1
            least = good[0] if alike or not good[0].number else min(good, key=lambda f: f.number or 0)
            names = "all" if len(good) == hosts else ", ".join(str(found.host) for found in good)
            rows.append((least, names))
        rows += [(found, str(found.host)) for found in of_check if found.level is not Level.OK]
    return rows


def _pairs(links: Sequence[Link]) -> Table:
    """Rows send, columns receive."""
    hosts = sorted({link.source for link in links} | {link.target for link in links})
    by_pair = {(link.source, link.target): link for link in links}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("from \\ to")
    for host in hosts:
        table.add_column(f"host {host}", justify="right")
    for source in hosts:
        cells = [_cell(by_pair.get((source, target))) for target in hosts]
        table.add_row(Text(f"host {source}"), *map(Text, cells))
    return table


def _cell(link: Link | None) -> str:
    if link is None:
        return ""
    return "nothing" if link.error else f"{rate(link.bytes_per_second)}, {1e6 * link.seconds:.0f} µs"


def verdict(diagnosis: Diagnosis) -> str:
    """One sentence.

    >>> verdict(Diagnosis(1, [Finding("clock", 0, Level.OK, "fine")], [], seconds=1.5))
    'Nothing is wrong: 1 host, 1.5 s.'
    """
    hosts = f"{diagnosis.hosts} host{'s' if diagnosis.hosts > 1 else ''}, {diagnosis.seconds:.1f} s"
    faults, warnings = diagnosis.faults, diagnosis.warnings
    worse = f"{len(faults)} fault{'s' if len(faults) > 1 else ''} to repair before training" if faults else ""
    bad = f"{len(warnings)} warning{'s' if len(warnings) > 1 else ''}" if warnings else ""
    if not worse and not bad:
        return f"Nothing is wrong: {hosts}."
    return f"{' and '.join(part for part in (worse, bad) if part)}: {hosts}."


def plain(text: str) -> str:
    """Without signs that a terminal obeys: some of it comes from other hosts.

    >>> plain("a\\x1b[31mb")
    'a?[31mb'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text)


def as_json(diagnosis: Diagnosis) -> str:
    """For programs; documented in docs/guides/doctor.md."""
    findings = [{**asdict(found), "level": found.level.name.lower()} for found in diagnosis.findings]
    return json.dumps(
        {
            "format": FORMAT,
            "hosts": diagnosis.hosts,
            "faults": len(diagnosis.faults),
            "warnings": len(diagnosis.warnings),
            "seconds": round(diagnosis.seconds, 3),
            "findings": findings,
            "links": [asdict(link) for link in diagnosis.links],
            "skews": {str(host): asdict(skew) for host, skew in diagnosis.skews.items()},
        },
        indent=1,
    )

"""Links: what a message and a stream take between each two hosts, or on loopback if there is one host only."""

from __future__ import annotations

from statistics import median

from shoal.doctor.finding import Check, Examination, Facts, Finding, Request, Says

MBIT = 1e6 / 8
SLOW = 900 * MBIT
"""Below a gigabit Ethernet."""
UNEVEN = 0.5
"""Of the median of all links."""
LATE_SECONDS = 0.001


def measure(_request: Request) -> Facts:
    return {}  # hosts measure in pairs, see drive.py


def judge(seen: Examination) -> list[Finding]:
    says = Says("links")
    for host, why in seen.missing.items():
        remedy = f"start the same command with --host {host} there; see its own words if it has ended"
        says.fault(host, why, None, "", remedy)
    whole = [link for link in seen.links if not link.error]
    usual = median([link.bytes_per_second for link in whole]) if whole else 0.0
    for link in seen.links:
        way = f"from host {link.source} to host {link.target}" if seen.request.hosts > 1 else "on loopback"
        speed = f"{rate(link.bytes_per_second)} {way}"
        if link.error:
            remedy = "a firewall between the two? Workers of all hosts connect to each other, at any port"
            says.fault(link.source, f"nothing gets {way} ({link.error})", None, "", remedy)
            continue
        if link.bytes_per_second < UNEVEN * usual:
            what = f"{speed}, and {rate(usual)} is usual here"
            says.warn(
                link.source, what, link.bytes_per_second, "bytes/s", "cable, port or switch of that pair"
            )
        elif link.bytes_per_second < SLOW:
            remedy = "`ddp + int8` or `local(16)`: docs/guides/slow-networks.md"
            says.warn(link.source, speed, link.bytes_per_second, "bytes/s", remedy)
        if link.seconds > LATE_SECONDS:
            what = f"a message takes {1000 * link.seconds:.1f} ms {way}"
            remedy = "hosts nearer to each other; larger buckets (`ddp(bucket_mb=64)`), `local(16)`"
            says.warn(link.source, what, link.seconds, "s", remedy)
    for host in seen.facts:
        mine = [link.bytes_per_second for link in whole if link.source == host]
        if mine and says.nothing_bad(host):
            where = "to the slowest" if seen.request.hosts > 1 else "on loopback"
            says.ok(host, f"{rate(min(mine))} {where}", min(mine), "bytes/s")
    return says.found


def rate(bytes_per_second: float) -> str:
    """As networks are sold.

    >>> rate(125e6), rate(1.25e6)
    ('1.0 Gb/s', '10 Mb/s')
    """
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.1f} Gb/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mb/s"


LINKS = Check("Each two hosts reach each other, fast and soon enough.", measure, judge)

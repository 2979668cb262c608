"""One examination: every host measures itself, hosts meet and measure their links, host 0 judges."""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from shoal.doctor import checks
from shoal.doctor.checks.ports import trouble
from shoal.doctor.finding import Examination, Facts, Finding, Level, Link, Request, Skew, number
from shoal.doctor.meet import Channel, Guest, NoAnswer, address_of, call, receive
from shoal.doctor.member import Member
from shoal.errors import ConfigError

MEASURE_SECONDS = 9.0
"""After this a measurement is left alone: a dead file server keeps whoever asks it."""
CLOCK_QUESTIONS = 16
LOOPBACK = "127.0.0.1"


@dataclass
class Diagnosis:
    """What came out."""

    hosts: int
    findings: list[Finding]
    links: list[Link]
    skews: Mapping[int, Skew] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def faults(self) -> list[Finding]:
        return [found for found in self.findings if found.level is Level.FAULT]

    @property
    def warnings(self) -> list[Finding]:
        return [found for found in self.findings if found.level is Level.WARNING]


def examine(request: Request) -> Diagnosis | None:
    """Look at everything; None on a host that is not host 0, which has answered and knows nothing of the others."""
    check(request)
    begun = time.monotonic()
    if request.host > 0:
        facts = measure(request)
        channel = call(request.at, request.host, request.hosts, request.wait, tell)
        Member(facts, str(channel.connection.getsockname()[0])).serve(channel)
        return None
    guests, missing = _meet(request)
    facts = measure(request)
    here, there = (Channel(end) for end in socket.socketpair())
    own = address_of(request.at)[0] if guests else LOOPBACK
    threading.Thread(target=Member(facts, own).serve, args=(there,), daemon=True).start()
    everybody = {0: Guest(here, own), **guests}
    heard: dict[int, dict[str, Facts]] = {}
    for host, guest in list(everybody.items()):
        try:
            heard[host] = _by_check(guest.channel.ask({"do": "facts"}))
        except NoAnswer as error:
            missing[host] = f"host {host} does not answer: {error}"
            del everybody[host]
    skews = {host: clock_of(guest.channel) for host, guest in everybody.items() if host > 0}
    links = measure_links(everybody)
    for guest in everybody.values():
        guest.channel.say({"do": "end"})
    findings = judge(
        request, heard, links, {h: skew for h, skew in skews.items() if skew is not None}, missing
    )
    return Diagnosis(
        request.hosts,
        findings,
        links,
        {h: skew for h, skew in skews.items() if skew is not None},
        time.monotonic() - begun,
    )


def check(request: Request) -> None:
    """Refuse what cannot be meant."""
    if not 0 <= request.host < request.hosts:
        raise ConfigError(
            f"--host {request.host} does not exist: with --hosts {request.hosts} it is 0 to {request.hosts - 1}."
        )
    if request.hosts > 1 and not request.at:
        raise ConfigError("--hosts needs --at ADDRESS:PORT, an address of host 0 that all hosts can reach.")
    if request.workers < 1:
        raise ConfigError(f"--workers {request.workers} is too few; it must be at least 1.")
    if request.at:
        address_of(request.at)


def tell(sentence: str) -> None:
    """Progress, where results do not go."""
    print(f"shoal: {sentence}.", file=sys.stderr, flush=True)


def _meet(request: Request) -> tuple[Mapping[int, Guest], dict[int, str]]:
    """On host 0: the others, and why one is not there."""
    if request.hosts == 1:
        return {}, {}
    # The check of ports says who is in the way; nobody can be waited for.
    if trouble(request.at):
        why = f"was not waited for: host 0 cannot listen at {request.at}"
        return {}, {host: f"host {host} {why}" for host in range(1, request.hosts)}
    with socket.create_server(address_of(request.at), backlog=request.hosts) as listener:
        guests = receive(listener, request.hosts, request.wait, tell)
    absent = [host for host in range(1, request.hosts) if host not in guests]
    return guests, {
        host: f"host {host} has not come to {request.at} in {request.wait:.0f} s" for host in absent
    }


def measure(request: Request) -> dict[str, Facts]:
    """The facts of every check on this host. All at the same time: most wait for something else than a core."""
    found: dict[str, Facts] = {}

    def one(name: str) -> None:
        try:
            found[name] = checks.TABLE[name].measure(request)
        except Exception as error:  # a doctor does not die of what it finds
            found[name] = {"error": f"{type(error).__name__}: {error}"}

    threads = [threading.Thread(target=one, args=(name,), daemon=True) for name in checks.TABLE]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + MEASURE_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    done = dict(found)
    return {name: done.get(name, {"error": f"no answer in {MEASURE_SECONDS:.0f} s"}) for name in checks.TABLE}


def _by_check(answer: Facts) -> dict[str, Facts]:
    """What a host has answered; NoAnswer if it is nothing of the kind."""
    found: dict[str, Facts] = {}
    for name in checks.TABLE:
        facts = answer.get(name)
        if not isinstance(facts, dict):
            raise NoAnswer(f"it says nothing of {name}; is it another version of Shoal?")
        found[name] = facts
    return found


def clock_of(channel: Channel) -> Skew | None:
    """How far ahead a host's clock is: of many questions, the answer that was fastest knows best."""
    best: Skew | None = None
    for _ in range(CLOCK_QUESTIONS):
        before, clock = time.monotonic(), time.time()
        try:
            theirs = number(channel.ask({"do": "clock"}), "now")
        except (NoAnswer, KeyError, TypeError):
            return best
        trip = time.monotonic() - before
        if best is None or trip / 2 < best.within:
            best = Skew(theirs - (clock + trip / 2), trip / 2)
    return best


def measure_links(everybody: Mapping[int, Guest]) -> list[Link]:
    """Each host to each other, or to itself if it is alone: as many pairs at a time as share no host."""
    if len(everybody) == 1:
        return [_link(everybody, 0, 0)] if 0 in everybody else []
    found: list[Link] = []
    with ThreadPoolExecutor(len(everybody)) as pool:
        for pairs in rounds(sorted(everybody)):
            for way in (pairs, [(b, a) for a, b in pairs]):
                found += pool.map(lambda pair: _link(everybody, *pair), way)
    return sorted(found, key=lambda link: (link.source, link.target))


def rounds(hosts: list[int]) -> list[list[tuple[int, int]]]:
    """Pairs of all hosts, in rounds in which each host is in one pair at most (the circle method).

    >>> rounds([0, 1, 2])
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    places: list[int | None] = [*hosts, *([None] if len(hosts) % 2 else [])]
    found = []
    for _ in range(len(places) - 1):
        half = len(places) // 2
        pairs = zip(places[:half], reversed(places[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        places = [places[0], places[-1], *places[1:-1]]
    return found


def _link(everybody: Mapping[int, Guest], source: int, target: int) -> Link:
    try:
        port = everybody[target].channel.ask({"do": "listen"})["port"]
        ask: Facts = {"do": "stream", "address": everybody[target].address, "port": port}
        answer = everybody[source].channel.ask(ask)
        return Link(source, target, number(answer, "seconds"), number(answer, "rate"))
    except (NoAnswer, KeyError, TypeError) as error:
        return Link(source, target, 0.0, 0.0, str(error) or "no answer")


def judge(
    request: Request,
    heard: Mapping[int, Mapping[str, Facts]],
    links: list[Link],
    skews: Mapping[int, Skew],
    missing: Mapping[int, str],
) -> list[Finding]:
    """The findings of every check, in the order of the table. What a host says is data, and may be nonsense."""
    found: list[Finding] = []
    for name, each in checks.TABLE.items():
        facts: dict[int, Facts] = {}
        for host, said in heard.items():
            if "error" in said[name]:
                what = f"it could not be measured: {str(said[name]['error'])[:200]}"
                found.append(
                    Finding(name, host, Level.FAULT, what, remedy="see to that first, then start again")
                )
            else:
                facts[host] = said[name]
        if not facts:
            continue
        try:
            found += each.judge(Examination(request, facts, links, skews, missing))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            what = f"a host has answered what nobody can read ({type(error).__name__}: {str(error)[:80]})"
            remedy = "the same version of Shoal on every host"
            found.append(Finding(name, max(facts), Level.FAULT, what, remedy=remedy))
    return found

"""What the doctor hears from other hosts is data: nonsense becomes a finding, never a traceback, a hang or growth."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.doctor.checks import TABLE
from shoal.doctor.drive import Diagnosis, _by_check, clock_of, judge, measure, rounds
from shoal.doctor.finding import Facts, Level, Link, Request, Skew
from shoal.doctor.meet import LINE, Channel, NoAnswer, read_line, receive
from shoal.doctor.member import Member
from shoal.doctor.report import as_json, draw, verdict

JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
GOOD = measure(Request())


def judged(facts: dict[str, Facts]) -> Diagnosis:
    heard = {0: GOOD, 1: facts}
    request = Request(hosts=2, at="127.0.0.1:29500")
    return Diagnosis(2, judge(request, heard, [Link(0, 1, 1e-4, 1e9)], {1: Skew(0.0, 0.001)}, {}), [])


def mutated(draw: random.Random) -> dict[str, Facts]:
    """The facts of a good host with some of them gone, or something else."""
    facts = {name: dict(said) for name, said in GOOD.items()}
    for _ in range(draw.randint(1, 4)):
        said = facts[draw.choice(list(TABLE))]
        if not said:
            continue
        values = (
            None,
            True,
            -1,
            10**400,
            1e308,
            float("nan"),
            "",
            "\x1b[31m[red]x",
            [],
            {},
            [None],
            {"a": []},
        )
        said[draw.choice(list(said))] = draw.choice(values)
        if draw.random() < 0.2:
            del said[draw.choice(list(said))]
    return facts


def test_facts_of_other_hosts_may_be_anything(everything: bool) -> None:
    draw_from = random.Random(7)
    console = Console(file=None, width=120, record=True, quiet=True)
    for turn in range(200_000 if everything else 300):
        diagnosis = judged(mutated(draw_from))
        if turn % 100 == 0:
            draw(diagnosis, console)
            assert verdict(diagnosis)
            assert "\x1b" not in as_json(diagnosis)


def test_answers_may_be_anything(everything: bool) -> None:
    """Lines of a host whose bytes have been changed: a report, a refusal, or a finding."""
    draw_from = random.Random(11)
    line = bytearray(json.dumps(GOOD).encode())
    for _ in range(100_000 if everything else 200):
        changed = bytearray(line)
        for _ in range(draw_from.randint(1, 3)):
            place = draw_from.randrange(len(changed))
            changed[place : place + draw_from.randint(0, 9)] = draw_from.randbytes(draw_from.randint(0, 3))
        with suppress(NoAnswer):
            judged(_by_check(read_line(bytes(changed))))


@given(st.binary(max_size=64) | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_line_is_a_message_or_refused(line: bytes) -> None:
    with suppress(NoAnswer):
        assert isinstance(read_line(line), dict)


@given(st.dictionaries(st.sampled_from(["do", "address", "port", "x"]), JSON, max_size=4))
def test_a_member_answers_every_question(question: Any) -> None:
    assert question.get("do") in ("listen", "stream") or Member(GOOD, "127.0.0.1")._answer(question)


def test_a_line_without_end_is_cut_off() -> None:
    here, there = socket.socketpair()

    def pour() -> None:
        try:
            while True:
                there.sendall(b"x" * 65536)
        except OSError:
            there.close()

    threading.Thread(target=pour, daemon=True).start()
    channel = Channel(here)
    with pytest.raises(NoAnswer, match="bytes in one line"):
        channel.hear(10)
    assert len(channel.rest) < LINE + (1 << 17)
    here.close()


def test_strangers_at_the_meeting_place_do_not_keep_others_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = listener.getsockname()
        strangers = [socket.create_connection(place) for _ in range(2)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(b'{"hello": "shoal doctor", "host": 7, "hosts": 2}\n')
        guest = Channel(socket.create_connection(place))
        guest.say({"hello": "shoal doctor", "host": 1, "hosts": 2})
        begun = time.monotonic()
        found = receive(listener, 2, 10, lambda _: None)
        assert set(found) == {1}
        assert time.monotonic() - begun < 8
        assert guest.hear(2) == {"hello": "shoal doctor"}
        assert b"no place for --host 7" in strangers[1].recv(1000)


def test_a_clock_is_measured_between_question_and_answer() -> None:
    here, there = socket.socketpair()

    class Shifted(Member):
        def _answer(self, _message: Facts) -> Facts:
            return {"now": time.time() + 3600}

    threading.Thread(target=Shifted(GOOD, "").serve, args=(Channel(there),), daemon=True).start()
    skew = clock_of(Channel(here))
    here.close()
    assert skew is not None
    assert abs(skew.seconds - 3600) <= skew.within + 1e-3
    assert skew.within < 0.5


def test_every_pair_meets_once_and_no_host_twice_at_a_time() -> None:
    for count in range(2, 10):
        pairs = [pair for pairs in rounds(list(range(count))) for pair in pairs]
        assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
        for at_once in rounds(list(range(count))):
            hosts = [host for pair in at_once for host in pair]
            assert len(hosts) == len(set(hosts))


def test_uneven_links_are_named_by_their_pair() -> None:
    request = Request(hosts=3, at="127.0.0.1:1")
    links = [Link(a, b, 1e-4, 1e9) for a in range(3) for b in range(3) if a != b]
    links[2] = Link(1, 0, 1e-4, 2e8)
    links[5] = Link(2, 1, 0.0, 0.0, "no answer in 8 s")
    found = [f for f in judge(request, dict.fromkeys(range(3), GOOD), links, {}, {}) if f.check == "links"]
    bad = {(f.host, f.level): f.what for f in found if f.level is not Level.OK}
    assert "1.6 Gb/s from host 1 to host 0, and 8.0 Gb/s is usual" in bad[1, Level.WARNING]
    assert "from host 2 to host 1 (no answer in 8 s)" in bad[2, Level.FAULT]

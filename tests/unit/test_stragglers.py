"""Who is called slow, from windows of times alone."""

from __future__ import annotations

from shoal.train.watch.not_finite import sentence
from shoal.train.watch.stragglers import WINDOW, Row, Stragglers

HOSTS = ["a", "a", "b", "b"]


def events(found: Stragglers, times: list[list[float]], window_seconds: float = 1.0) -> list[tuple[int, int]]:
    said = []
    for number, row in enumerate(times, 1):
        rows = [Row(seconds, 1.0) for seconds in row]
        for each in found.see(number * WINDOW, rows, number * window_seconds):
            if each.event:
                said.append((int(str(each.facts["rank"])), number))
    return said


def test_slow_in_two_windows_is_named_once() -> None:
    slow, fast = [0.1, 0.1, 0.14, 0.1], [0.1] * 4
    assert events(Stragglers([(0, 0)] * 4, HOSTS), [fast, slow, slow, slow]) == [(2, 3)]
    assert events(Stragglers([(0, 0)] * 4, HOSTS), [slow, fast, slow, fast]) == []
    assert events(Stragglers([(0, 0)] * 4, HOSTS), [slow, slow, fast, slow, slow]) == [(2, 2), (2, 5)]


def test_less_is_no_straggler() -> None:
    assert events(Stragglers([(0, 0)] * 4, HOSTS), [[0.1, 0.1, 0.125, 0.1]] * 5) == []
    assert events(Stragglers([(0, 0)] * 4, HOSTS), [[1e-4, 1e-4, 5e-4, 1e-4]] * 5) == []
    assert events(Stragglers([(0, 0)] * 4, HOSTS), [[0.1, 0.1, 0.2, 0.1]] * 5, window_seconds=0.2) == [(2, 5)]


def test_stages_are_compared_with_their_like() -> None:
    places = [(0, 0), (1, 0), (0, 0), (1, 0)]
    assert events(Stragglers(places, HOSTS), [[0.1, 0.3, 0.1, 0.3]] * 4) == []
    assert events(Stragglers(places, HOSTS), [[0.1, 0.3, 0.1, 0.4]] * 4) == [(3, 2)]


def test_a_loss_unlike_the_others() -> None:
    found = Stragglers([(0, 0)] * 3, HOSTS[:3])
    rows = [Row(0.1, 1.0), Row(0.1, 40.0), Row(0.1, 1.2)]
    said = [each.text for number in range(4) for each in found.see(number, rows, float(number))]
    assert len(said) == 1
    assert said[0].startswith("the loss of rank 1 is 40")


def test_the_cause_of_what_is_not_finite_in_words() -> None:
    clean = {"loss": False, "samples": [1], "bad": [], "gradient": ""}
    assert "no rank's own" in sentence({0: clean, 1: clean})
    assert sentence({0: clean}) == ""
    broken = {0: {"parameter": "a.b"}, 1: {"parameter": ""}}
    assert sentence(broken).startswith(": parameter a.b is not finite on rank 0")
    many = clean | {"loss": True, "samples": list(range(20))}
    assert sentence({0: clean, 3: many, 4: many}).startswith(
        ": it comes from rank 3 (and 1 more), with samples 0, 1"
    )

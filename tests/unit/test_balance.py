"""Balance without processes: shares settle, follow, keep limits; what is remembered is checked."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.balance import TABLE, make_balance
from shoal.balance.base import Balance, Basis
from shoal.balance.deal import deal, slowest
from shoal.balance.remembered import ENTRIES, LARGEST, check_speeds, default_path, keep, key_of, stored_speeds
from shoal.data.feed import Feed
from shoal.data.loader import Loader
from shoal.data.sharing import Sharing
from shoal.data.stream import StreamLoader
from shoal.errors import ConfigError
from shoal.pipeline.split import choose_cuts
from shoal.world.free_memory import free_memory

INF = math.inf
Speeds = Callable[[int], tuple[float, ...]]
FOLLOWING = ("dynamic", "history", "predict")


def simulate(
    text: str,
    speeds: Speeds,
    steps: int,
    units: int = 64,
    noise: float = 0.0,
    fixed: float = 0.0,
    lag: int = 0,
    seed: int = 0,
) -> tuple[list[tuple[int, ...]], list[float]]:
    """The shares of each step, and how much longer it took than it had to, without the noise."""
    drawn, workers = random.Random(seed), len(speeds(0))
    sharer = make_balance(text).start(Basis(workers, units, lag))
    coming = [sharer.shares] * (lag + 1)
    shares, excess = [], []
    best: dict[tuple[float, ...], float] = {}
    for step in range(steps):
        now, fast = coming.pop(0), speeds(step)
        seconds = [fixed + n / v for n, v in zip(now, fast, strict=True)]
        shares.append(now)
        if fast not in best:
            best[fast] = fixed + slowest(deal(fast, units, [INF] * workers), fast)
        excess.append(max(seconds) / best[fast])
        if sharer.window:
            sharer.observe(now, [took * max(0.2, drawn.gauss(1.0, noise)) for took in seconds])
        coming.append(sharer.shares)
    return shares, excess


def changes(shares: list[tuple[int, ...]], after: int = 0) -> int:
    return sum(a != b for a, b in zip(shares[after:], shares[after + 1 :], strict=False))


fast = st.floats(0.05, 20.0)


@settings(max_examples=200, deadline=None)
@given(speeds=st.lists(fast, min_size=1, max_size=6), extra=st.integers(0, 40), data=st.data())
def test_dealing_is_whole_and_best(speeds: list[float], extra: int, data: st.DataObject) -> None:
    units = len(speeds) + extra
    most = data.draw(
        st.lists(st.just(INF) | st.floats(0.0, 30.0), min_size=len(speeds), max_size=len(speeds))
    )
    dealt = deal(speeds, units, most)
    assert sum(dealt) == units
    assert min(dealt) >= 1
    caps = [max(1, math.floor(min(limit, units))) for limit in most]
    if sum(caps) >= units:
        assert all(share <= cap for share, cap in zip(dealt, caps, strict=True))
        # No single unit at another place lets the last be ready earlier: for such a problem that is the optimum.
        last = max(range(len(speeds)), key=lambda i: dealt[i] / speeds[i])
        for other, cap in enumerate(caps):
            if other != last and dealt[other] < cap and dealt[last] > 1:
                assert (dealt[other] + 1) / speeds[other] >= dealt[last] / speeds[last] * (1 - 1e-9)


@pytest.mark.parametrize("text", FOLLOWING)
@settings(max_examples=40, deadline=None)
@given(
    speeds=st.lists(st.floats(1.0, 4.0), min_size=2, max_size=5),
    noise=st.floats(0.0, 0.15),
    fixed=st.sampled_from([0.0, 5.0]),
    lag=st.sampled_from([0, 2]),
    seed=st.integers(0, 1000),
)
def test_constant_speeds_settle(
    text: str, speeds: list[float], noise: float, fixed: float, lag: int, seed: int
) -> None:
    shares, excess = simulate(text, lambda _: tuple(speeds), 200, 64, noise, fixed, lag, seed)
    assert excess[-1] < 1.08 + 2.5 * noise, (shares[-1], excess[-1])
    assert changes(shares) <= 10
    assert changes(shares, after=60) <= 5, "no oscillation"


@pytest.mark.parametrize("text", FOLLOWING)
def test_without_noise_one_change_is_enough(text: str) -> None:
    shares, excess = simulate(text, lambda _: (4.0, 1.0), 100)
    assert changes(shares) == 1
    assert shares[-1] in ((51, 13), (52, 12))
    assert excess[10] == 1.0


@pytest.mark.parametrize("text", FOLLOWING)
@settings(max_examples=30, deadline=None)
@given(ratio=st.floats(1.5, 4.0), noise=st.floats(0.0, 0.08), seed=st.integers(0, 1000))
def test_a_change_is_followed(text: str, ratio: float, noise: float, seed: int) -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (ratio, 1.0, 1.0) if step < 50 else (1.0, 1.0, ratio)

    shares, excess = simulate(text, speeds, 90, 96, noise, seed=seed)
    assert excess[49] < 1.08 + 2.5 * noise
    assert excess[50] > 1.3, "it came as a surprise"
    assert excess[75] < 1.08 + 2.5 * noise, "25 steps later nobody waits any more"
    assert changes(shares) <= 12


def test_one_step_that_was_held_up_changes_nothing() -> None:
    sharer = make_balance("dynamic").start(Basis(2, 32))
    for step in range(60):
        sharer.observe(sharer.shares, [1.0, 20.0 if step % 11 == 4 else 1.0])
        assert sharer.shares == (16, 16)


def test_who_had_nothing_keeps_the_old_estimate() -> None:
    sharer = make_balance("dynamic").start(Basis(2, 30))
    for _ in range(20):
        sharer.observe((15, 15), [1.0, 2.0])
    before = sharer.shares
    assert before == (20, 10)
    for _ in range(20):
        sharer.observe((30, 0), [1.5 * 20 / 15, 0.0])
    assert sharer.shares == before


def test_prediction_is_ahead_of_a_drift() -> None:
    def speeds(step: int) -> tuple[float, ...]:
        return (1.0, 1.0 / (1.0 + 0.01 * step))

    lost = {text: sum(simulate(text, speeds, 200, 256, 0.0, lag=4)[1]) / 200 for text in FOLLOWING}
    assert lost["predict"] < 1.04
    assert lost["predict"] - 1.0 < 0.7 * (lost["dynamic"] - 1.0)


def test_static_measures_once() -> None:
    shares, excess = simulate("static(steps=7)", lambda step: (3.0, 1.0) if step < 40 else (1.0, 3.0), 80)
    assert shares[6] == (32, 32)
    assert shares[7] == shares[-1] == (48, 16)
    assert excess[10] == 1.0
    assert excess[-1] == 3.0, "it stays what it is"


def test_limits_are_kept() -> None:
    sharer = make_balance("dynamic").start(Basis(2, 32, most=(18.0, INF)))
    for _ in range(20):
        sharer.observe(sharer.shares, [sharer.shares[0] / 3.0, sharer.shares[1] / 1.0])
    assert sharer.shares == (18, 14)
    sharer.limit((10.0, INF))
    for _ in range(5):
        sharer.observe(sharer.shares, [sharer.shares[0] / 3.0, sharer.shares[1] / 1.0])
    assert sharer.shares == (10, 22), "also where it makes the step slower"


@pytest.mark.parametrize("name", TABLE)
def test_facts(name: str) -> None:
    chosen = TABLE[name]
    module = importlib.import_module(chosen.__module__)
    assert chosen.__module__ == f"shoal.balance.{name}"
    assert "When to use" in (module.__doc__ or "")
    made = make_balance(name)
    assert isinstance(made, Balance)
    known = made.start(Basis(2, 30, known=(2.0, 1.0)))
    assert known.shares == ((20, 10) if made.measures else (15, 15)), (
        "what is known counts from the first step on"
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dynamik", "did you mean 'dynamic'"),
        ("dynamic(every=0)", "it looks every 1 or more steps"),
        ("predict(band=1.5)", "band is a part of a step's time"),
        ("static(shares=3/0)", "give each worker a number from 1e-06"),
        ("static(shares=a/b)", "give each worker a number from 1e-06"),
        ("static(steps=0)", "at least 1 step"),
        ("dynamic(most=0/4)", "give each worker a number from 1 to"),
        ("even(3)", "takes no options"),
    ],
)
def test_what_cannot_work_is_refused(text: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        make_balance(text)


def test_speeds_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path()
    assert path == tmp_path / "shoal" / "speeds.json"
    key = key_of({"a": (2, 3)}, ["one", "two"])
    assert stored_speeds(path, key, 2) == ()
    keep(path, key, [2.0, 1.0], now=5.0)
    assert stored_speeds(path, key, 2) == (2.0, 1.0)
    assert stored_speeds(path, key, 3) == ()
    assert stored_speeds(path, key_of({"a": (2, 3)}, ["one", "three"]), 2) == ()
    assert stored_speeds(path, key_of({"a": (3, 2)}, ["one", "two"]), 2) == ()
    for number in range(ENTRIES):
        keep(path, f"other{number}", [1.0], now=6.0 + number)
    assert stored_speeds(path, key, 2) == (), "the oldest goes"
    assert stored_speeds(path, "other0", 1) == (1.0,)
    assert [file.name for file in path.parent.iterdir()] == ["speeds.json"]


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[" * 100_000,
        b"\xff\xfe",
        b"[]",
        b'{"format": 2, "entries": {"k": {"speeds": [1, 2]}}}',
        b'{"format": 1, "entries": []}',
        b'{"format": 1, "entries": {"k": [1, 2]}}',
        b'{"format": 1, "entries": {"k": {"speeds": [1, NaN]}}}',
        b'{"format": 1, "entries": {"k": {"speeds": [1, -2]}}}',
        b'{"format": 1, "entries": {"k": {"speeds": [true, 2]}}}',
        b'{"format": 1, "entries": {"k": {"speeds": [1e-9, 2]}}}',
        b'{"format": 1, "entries": {"k": {"speeds": [1, 2]}}}' + b" " * LARGEST,
    ],
)
def test_a_damaged_file_counts_as_empty(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "speeds.json"
    path.write_bytes(text)
    assert stored_speeds(path, "k", 2) == ()
    keep(path, "k", [3.0, 1.0], now=1.0)
    assert stored_speeds(path, "k", 2) == (3.0, 1.0)
    assert json.loads(path.read_text())["format"] == 1


def test_speeds_of_a_checkpoint_are_checked() -> None:
    assert check_speeds([3, 1.0], 2) == (3.0, 1.0)
    for wrong in (None, [], [1.0], [1.0, INF], [1.0, 0.0], "ab", {"a": 1}):
        assert check_speeds(wrong, 2) == ()


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 3),
    accumulate=st.integers(1, 2),
    moves=st.lists(
        st.tuples(st.integers(0, 12), st.lists(st.integers(1, 9), min_size=3, max_size=3)), max_size=4
    ),
    stream=st.booleans(),
)
def test_new_shares_divide_the_same_steps(
    size: int, accumulate: int, moves: list[tuple[int, list[int]]], stream: bool
) -> None:
    """Whatever changes when, each step has the samples it had, each of them once."""

    class Numbers:
        def __iter__(self):
            return iter(range(40))

    make = StreamLoader if stream else Loader
    data = Numbers() if stream else list(range(40))
    feeds = [Feed(data, 12, rank, size, accumulate) for rank in range(size)]
    loaders = [make(feed) for feed in feeds]
    alone = make(Feed(data, 12, 0, 1))
    for step in range(13):
        for at, shares in moves:
            if at == step:
                for loader in loaders:
                    loader.reshare(step, shares[:size])
        portions = [loader.take(step) for loader in loaders]
        found = [
            i
            for portion in portions
            for batch in portion.batches
            if batch is not None
            for i in batch.tolist()
        ]
        assert found == alone.take(step).batches[0].tolist()
        assert [loader.handed for loader in loaders] == [portion.own for portion in portions]
        now = [shares[:size] for at, shares in moves if at <= step]
        latest = max((at for at, _ in moves if at <= step), default=None)
        if now and latest is not None and accumulate == 1 and portions[0].samples == 12:
            weights = [shares[:size] for at, shares in moves if at == latest][-1]
            fair = [12 * weight / sum(weights) for weight in weights]
            assert all(abs(p.own - f) < 1 for p, f in zip(portions, fair, strict=True))


def test_batches_prepared_ahead_are_of_the_right_shares() -> None:
    """Processes have prepared later steps already: new shares are right from their step on, early or late."""
    loaders = [Loader(Feed(list(range(400)), 20, rank, 2, workers=1)) for rank in range(2)]
    plain = Loader(Feed(list(range(400)), 20, 0, 1))
    assert loaders[0].lag == 2
    moves = {3: (3 + loaders[0].lag, (3, 1)), 9: (9, (1, 4)), 14: (16, (1, 1))}
    for step in range(20):
        if step in moves:
            for loader in loaders:
                loader.reshare(*moves[step])
        mine = [loader.take(step).batches[0].tolist() for loader in loaders]
        assert mine[0] + mine[1] == plain.take(step).batches[0].tolist()
        wanted = 10 if step < 5 or step >= 16 else 15 if step < 9 else 4
        assert len(mine[0]) == wanted, step


def test_shares_of_earlier_steps_stay() -> None:
    sharing = Sharing(Feed(list(range(8)), 4, 0, 2).partition.weights(4))
    sharing.change(5, [2, 1])
    sharing.change(9, [1, 3])
    sharing.change(7, [5, 1])
    assert [sharing.at(step)[1].tolist()[::2] for step in (4, 5, 7, 9)] == [[1, 1], [2, 1], [5, 1], [5, 1]]
    assert len({sharing.at(step)[0] for step in (4, 5, 7)}) == 3


@settings(max_examples=60, deadline=None)
@given(
    costs=st.lists(st.floats(0.1, 5.0), min_size=3, max_size=7),
    speeds=st.lists(st.floats(0.2, 4.0), min_size=3, max_size=3),
)
def test_stages_are_cut_by_speed(costs: list[float], speeds: list[float]) -> None:
    def time_of(cuts: tuple[int, ...]) -> float:
        edges = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) / v for a, b, v in zip(edges, edges[1:], speeds, strict=False))

    best = min(time_of((a, b)) for a in range(1, len(costs) - 1) for b in range(a + 1, len(costs)))
    assert time_of(choose_cuts(costs, 3, speeds)) == pytest.approx(best)
    assert choose_cuts(costs, 3) == choose_cuts(costs, 3, [1.0, 1.0, 1.0])


def test_free_memory_minds_the_groups_around(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    inner = tmp_path / "groups" / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    (inner.parent / "memory.max").write_text("5000\n")
    (inner.parent / "memory.current").write_text("4000\n")
    (inner.parent / "memory.stat").write_text("anon 7\ninactive_file 300\n")
    assert free_memory(tmp_path / "groups", own) == 1300
    assert free_memory(tmp_path / "groups", tmp_path / "nothing") > 5000

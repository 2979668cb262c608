"""The dense shard: the same bits as torch, whatever the order and however often things are said."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim

from shoal.aggregate import make_aggregate
from shoal.optimizer import FUSED
from shoal.server.dense.dense_machine import Dense
from shoal.server.protocol.optimizer_description import describe
from shoal.server.protocol.state_machine import Answer, Operation, Refused
from shoal.server.transport.slabs import Opened
from shoal.world.shm.memory import SharedMemoryUnavailable

SIZE = 23
PIECES = [[0, 7, 0], [7, 9, 1], [16, 5, 0]]
"""The last two values belong to no piece."""
KINDS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampened": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, dampening=0.1),
    "adam": lambda groups: optim.Adam(groups, lr=0.1, amsgrad=True),
    "adamw": lambda groups: optim.AdamW(groups, lr=0.1, betas=(0.8, 0.95)),
    "rmsprop": lambda groups: optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.1),
}


def numbers(seed: int, size: int = SIZE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def description(kind: str = "adamw") -> dict[str, Any]:
    shell = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    return describe(KINDS[kind]([{"params": shell[:1]}, {"params": shell[1:], "lr": 0.03}]))


def init_args(pieces: Any = PIECES, kind: str = "adamw", **changes: Any) -> dict[str, Any]:
    plain = {"optimizer": description(kind), "aggregate": "weighted", "hold": False}
    return {"pieces": pieces, **plain, **changes}


def machine(
    kind: str = "adamw",
    aggregate: str = "weighted",
    hold: bool = False,
    dtype: torch.dtype = torch.float32,
    clock: int = 0,
) -> Dense:
    made = Dense()
    args = init_args(kind=kind, aggregate=aggregate, hold=hold)
    made.apply(Operation("init", clock, args, numbers(0, dtype=dtype)))
    return made


def stage(made: Dense, step: int, part: int, gradient: torch.Tensor, micro: int = 0) -> bool:
    given = gradient.clone()
    found = made.apply(Operation("stage", step, {"part": part, "micro": micro}, given))
    given.fill_(torch.nan)  # a tensor is borrowed for the call only
    return bool(found.value["dup"])


def update(parts: Sequence[int], counts: Sequence[float] | None = None, **changes: Any) -> dict[str, Any]:
    pairs = [[part, count] for part, count in zip(parts, counts or [1] * len(parts), strict=True)]
    plain = {"factor": 1.0, "limit": None, "settings": None, "used": None, "share": 1.0, "floor": 0}
    return {"parts": pairs, **plain, **changes}


def act(
    made: Dense, step: int, parts: Sequence[int], counts: Sequence[float] | None = None, **changes: Any
) -> Any:
    return made.apply(Operation("apply", step, update(parts, counts, **changes))).value


def ask(made: Dense, name: str, step: int = 0, **args: Any) -> Answer:
    found = made.answer(Operation(name, step, args))
    assert found is not None
    return found


def values(made: Dense) -> torch.Tensor:
    found = ask(made, "values").tensor
    assert found is not None
    return found.clone()


def state(made: Dense) -> Any:
    """Everything, in a form that can be compared; doubles as a test that snapshots are plain."""
    value, tensor = made.snapshot()
    return json.dumps(value, sort_keys=True), tensor.numpy().tobytes()


class Reference:
    """A torch optimizer on pieces of one flat vector."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        self.values = numbers(0, dtype=dtype)
        self.tensors = [self.values[start : start + count] for start, count, _ in PIECES]
        groups = [
            {
                "params": [t for t, piece in zip(self.tensors, PIECES, strict=True) if piece[2] == group],
                **extra,
            }
            for group, extra in enumerate([{}, {"lr": 0.03}])
        ]
        self.optimizer = KINDS[kind](groups)
        if type(self.optimizer) in FUSED and kind != "dampened":
            for group in self.optimizer.param_groups:
                group["fused"] = True

    def step(self, gradient: torch.Tensor, used: Sequence[int] = (0, 1, 2)) -> None:
        for index, (start, count, _) in enumerate(PIECES):
            self.tensors[index].grad = gradient[start : start + count].clone() if index in used else None
        self.optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bits_as_torch(kind: str, dtype: torch.dtype) -> None:
    made, reference = machine(kind, dtype=dtype), Reference(kind, dtype)
    for step in range(4):
        parts = [numbers(10 * step + part, dtype=dtype) for part in range(1, 4)]
        for part, gradient in enumerate(parts):
            assert not stage(made, step, part, gradient)
        assert act(made, step, [2, 0, 1], factor=0.25)["dup"] is False
        reference.step(((parts[0] + parts[1]) + parts[2]) * 0.25)
        assert torch.equal(values(made), reference.values)
    keys = ask(made, "keys").value
    for key, each in keys.items():
        entry = ask(made, "state", key=key)
        for index, (start, count, _) in enumerate(PIECES):
            wanted = reference.optimizer.state[reference.tensors[index]][key]
            if each:
                assert entry.tensor is not None
                assert torch.equal(entry.tensor[start : start + count], wanted)
            else:
                assert entry.value["values"][index] == float(wanted)
    assert set(keys) == set(reference.optimizer.state.get(reference.tensors[0], {}))


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("micros", [1, 2])
def test_any_order_of_arrival_gives_the_same_bits(hold: bool, micros: int) -> None:
    parts = 4 if micros == 1 else 3
    pairs = list(itertools.product(range(parts), range(micros)))
    gradients = {pair: numbers(5 + index) for index, pair in enumerate(pairs)}
    sums = []
    for micro in range(micros):
        total = gradients[0, micro].clone()
        for part in range(1, parts):
            total += gradients[part, micro]
        sums.append(total)
    wanted = sums[0] if micros == 1 else sums[0] + sums[1]
    reference = Reference("adamw")
    reference.step(wanted)
    orders = list(itertools.permutations(pairs))
    for order in orders[:: 1 if micros == 1 else 37]:
        made = machine(hold=hold)
        for part, micro in order:
            stage(made, 0, part, gradients[part, micro], micro)
        counted = [[part, 1] for part in range(parts)]
        assert torch.equal(ask(made, "gradient", parts=counted).tensor, wanted)
        act(made, 0, range(parts))
        assert torch.equal(values(made), reference.values)


@pytest.mark.parametrize("aggregate", ["weighted", "mean", "median", "trimmed(0.34)"])
def test_aggregates(aggregate: str) -> None:
    made, counts = machine("sgd", aggregate), [2.0, 0.0, 3.0, 1.0]
    parts = [numbers(part + 1) * count for part, count in enumerate(counts)]
    for part in (3, 1, 0, 2):
        stage(made, 0, part, parts[part] / 2, micro=1)
        stage(made, 0, part, parts[part] / 2, micro=0)
    wanted = torch.empty(SIZE)
    make_aggregate(aggregate).combine(parts, counts, wanted)
    found = ask(made, "gradient", parts=[[i, c] for i, c in enumerate(counts)]).tensor
    assert found is not None
    if (
        aggregate == "weighted"
    ):  # micro-batches were halved exactly, but sums of halves are taken in another order
        torch.testing.assert_close(found, wanted)
    else:
        assert torch.equal(found, wanted)
    ranges = [[0, 5], [5, SIZE], [3, 3]]
    squares = ask(made, "squares", parts=[[i, c] for i, c in enumerate(counts)], ranges=ranges).value
    assert squares == [float(torch.linalg.vector_norm(found[a:b])) ** 2 for a, b in ranges]
    reference = Reference("sgd")
    reference.step(found)
    act(made, 0, range(4), counts)
    assert torch.equal(values(made), reference.values)


def test_doubles_change_nothing() -> None:
    made = machine()
    stage(made, 0, 1, numbers(1))
    before = state(made)
    assert stage(made, 0, 1, numbers(2))
    assert state(made) == before
    stage(made, 0, 0, numbers(3))
    before = state(made)
    assert stage(made, 0, 0, numbers(2)), "it is in the sum by now"
    assert state(made) == before
    act(made, 0, [0, 1])
    before = state(made)
    assert act(made, 0, [1, 0])["dup"]
    assert act(made, 0, [1])["dup"]
    assert stage(made, 0, 1, numbers(2))
    assert stage(made, 0, 1, numbers(2), micro=1)
    assert made.apply(Operation("drop", 0, {"parts": [0, 1], "floor": 0})).value["dup"]
    assert state(made) == before
    act(made, 1, [], floor=2)
    before = state(made)
    assert stage(made, 1, 7, numbers(2)), "below the floor everything is done"
    assert act(made, 1, [7])["dup"]
    assert state(made) == before


def test_parts_one_by_one() -> None:
    """As ssp and asp do: every part is an update of its own."""
    made, reference = machine("momentum", hold=True), Reference("momentum")
    for part in (2, 0, 1):
        stage(made, 0, part, numbers(part + 1))
    for part in (0, 2, 1):
        assert not act(made, 0, [part], share=0.5, settings=[{"lr": 0.2}, {"lr": 0.06}])["dup"]
        reference.step(numbers(part + 1))
        assert act(made, 0, [part])["dup"]
    assert torch.equal(values(made), reference.values), "half of twice the rate"


def test_a_step_may_be_dropped() -> None:
    made, other = machine(), machine()
    for part in range(3):
        stage(made, 0, part, numbers(part + 1))
    made.apply(Operation("drop", 0, {"parts": [[0, 1], [1, 1], [2, 1]], "floor": 0}))
    assert torch.equal(values(made), values(other))
    assert stage(made, 0, 2, numbers(3))
    assert act(made, 0, [0, 1, 2])["dup"]
    assert made.answer(Operation("values", 0, {"applied": 1})) is not None
    assert made.metrics()["parts_staged"] == 0


def test_values_wait_for_their_step() -> None:
    made = machine(clock=5)
    assert made.answer(Operation("values", 0, {"applied": 5})) is not None
    assert made.answer(Operation("values", 0, {"applied": 6})) is None
    act(made, 6, [])
    assert made.answer(Operation("values", 0, {"applied": 6})) is None, "5 is missing"
    act(made, 5, [])
    assert made.answer(Operation("values", 0, {"applied": 7})) is not None
    assert made.answer(Operation("values", 0, {"applied": 8})) is None
    assert Dense().answer(Operation("values", 0, {"applied": 0})) is None, (
        "before init there is nothing to read"
    )
    assert made.answer(Operation("gradient", 7, {"parts": [[0, 1]]})) is None


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_without_gradient(kind: str) -> None:
    made, reference = machine(kind), Reference(kind)
    for step, used in enumerate([[0, 2], [1], [], [0, 1, 2]]):
        stage(made, step, 0, numbers(step + 1))
        act(made, step, [0], used=used)
        reference.step(numbers(step + 1), used)
        assert torch.equal(values(made), reference.values)


def test_limit() -> None:
    made, reference = machine("sgd"), Reference("sgd")
    stage(made, 0, 0, numbers(1))
    act(made, 0, [0], factor=3.0, limit=0.5)
    reference.step((numbers(1) * 3.0).clamp(-0.5, 0.5))
    assert torch.equal(values(made), reference.values)


def test_gradients_of_another_type() -> None:
    made, other = machine("sgd"), machine("sgd")
    for part in range(2):
        stage(made, 0, part, numbers(part + 1).bfloat16())
        stage(other, 0, part, numbers(part + 1).bfloat16().float())
    act(made, 0, [0, 1])
    act(other, 0, [0, 1])
    assert torch.equal(values(made), values(other))


def test_version_and_shared_memory() -> None:
    made, opened = machine(), Opened()
    found = ask(made, "values")
    assert found.where is not None
    seen = opened.tensor(found.where)
    assert seen is not None
    assert torch.equal(seen, values(made))
    word = opened.tensor(type(found.where)(found.where.path, 0, 1, torch.int64))
    assert word is not None
    assert found.value["version"] == int(word[0])
    assert int(word[0]) % 2 == 0
    during: list[int] = []
    shard = made._shard
    assert shard is not None
    shard.trained.optimizer.register_step_pre_hook(lambda *_: during.append(int(word[0])))
    shard.trained.optimizer.register_step_post_hook(lambda *_: during.append(int(word[0])))
    stage(made, 0, 0, numbers(1))
    version = act(made, 0, [0])["version"]
    assert during == [version - 1, version - 1]
    assert version == int(word[0]) == found.value["version"] + 2
    assert torch.equal(seen, values(made)), "values change where they are"
    opened.close()


def test_first_values_may_come_again_until_training_begins() -> None:
    made, again, opened = machine(), init_args([[0, 4, 0]]), Opened()
    where = ask(made, "values").where
    assert where is not None
    seen, word = opened.tensor(where), opened.tensor(type(where)(where.path, 0, 1, torch.int64))
    assert seen is not None
    assert word is not None
    version = int(word[0])
    made.apply(Operation("init", 0, again, numbers(4)))
    assert torch.equal(seen, numbers(4)), "memory that fits is kept"
    assert int(word[0]) == version + 2
    made.apply(Operation("init", 0, again, numbers(4, 40)))
    assert int(word[0]) % 2 == 1, "whoever still looks at the old memory sees that it is none"
    assert ask(made, "values").value["version"] == version + 4
    opened.close()


def test_first_values_that_come_late_change_nothing() -> None:
    made = machine()
    stage(made, 0, 0, numbers(1))
    entry = {"key": "exp_avg", "each": True, "pieces": [0], "values": None, "dtype": "float32"}
    for trained in (False, True):
        if trained:
            act(made, 0, [0])
        value, tensor = made.snapshot()
        assert made.apply(Operation("init", 0, init_args(), numbers(5))).value["dup"]
        assert not made.apply(Operation("state", 0, entry, numbers(6))).value["kept"]
        after, bytes_after = made.snapshot()
        assert after == value
        assert torch.equal(bytes_after, tensor)


def test_without_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(nbytes: int) -> Any:
        raise SharedMemoryUnavailable(f"{nbytes} bytes")

    monkeypatch.setattr("shoal.server.dense.shard_values.Slab", none)
    made, reference = machine(), Reference("adamw")
    stage(made, 0, 0, numbers(1))
    assert act(made, 0, [0])["version"] == 4
    reference.step(numbers(1))
    assert ask(made, "values").where is None
    assert torch.equal(values(made), reference.values)


@pytest.mark.parametrize("kind", KINDS)
def test_state_goes_to_another_shard(kind: str) -> None:
    """As from a checkpoint: by keys, for the pieces that have it."""
    made, other = machine(kind), machine(kind)
    for step in range(2):
        stage(made, step, 0, numbers(step + 1))
        act(made, step, [0], used=[0, 2])
    other.apply(Operation("init", 2, init_args(kind=kind), values(made)))
    for key, each in ask(made, "keys").value.items():
        entry = ask(made, "state", key=key)
        assert entry.value["each"] == each
        plain = json.loads(json.dumps(entry.value))
        assert other.apply(Operation("state", 2, plain, entry.tensor)).value["kept"]
    for one in (made, other):
        stage(one, 2, 0, numbers(9))
        act(one, 2, [0])
    assert torch.equal(values(made), values(other))


def test_state_that_does_not_belong() -> None:
    made = machine("adamw")
    foreign = {"key": "momentum_buffer", "each": True, "pieces": [0], "values": None}
    before = state(made)
    assert not made.apply(Operation("state", 0, foreign, numbers(1))).value["kept"]
    assert state(made) == before
    with pytest.raises(Refused, match="keeps one number a piece as 'step'"):
        made.apply(Operation("state", 0, {**foreign, "key": "step"}, numbers(1)))
    made.apply(Operation("state", 0, {**foreign, "key": "exp_avg"}, numbers(1)))
    stage(made, 0, 0, numbers(1))
    before = state(made)
    with pytest.raises(
        Refused, match="piece 0 has exp_avg of AdamW's state and lacks exp_avg_sq, step; load all"
    ):
        act(made, 0, [0])
    assert state(made) == before


# Sequences of operations, good and bad.

BAD: list[tuple[str, Any, torch.Tensor | None]] = [
    ("stage", {"part": -1}, numbers(1)),
    ("stage", {"part": True}, numbers(1)),
    ("stage", {}, numbers(1)),
    ("stage", None, numbers(1)),
    ("stage", {"part": 9}, numbers(1, SIZE - 1)),
    ("stage", {"part": 9}, None),
    ("stage", {"part": 9}, torch.zeros(SIZE, dtype=torch.int64)),
    ("stage", {"part": 9}, torch.zeros(SIZE, dtype=torch.float8_e5m2)),
    ("apply", update([77]), None),
    ("apply", update([0, 0]), None),
    ("apply", update([], factor=0.0), None),
    ("apply", update([], factor=float("nan")), None),
    ("apply", update([], share=-1.0), None),
    ("apply", update([], limit="1"), None),
    ("apply", update([], used=[3]), None),
    ("apply", update([], floor=1.5), None),
    ("apply", update([], settings=[{"lr": 0.1}]), None),
    ("apply", update([], settings=[{"lr": 0.1}, {"rate": 1}]), None),
    ("apply", update([], settings=[{"lr": 0.1}, {"lr": None}]), None),
    ("apply", update([], settings=[{"lr": 0.1}, {"lr": [1, 2]}]), None),
    ("apply", update([], settings=[{"lr": 0.1}, {"betas": [0.9]}]), None),
    ("apply", update([], settings=[{"lr": 0.1}, {"maximize": True}]), None),
    ("apply", {"factor": 1.0}, None),
    ("drop", {"parts": ["a"]}, None),
    ("drop", {"parts": 3}, None),
    ("state", {"key": "exp_avg", "each": True, "pieces": [0, 9], "values": None}, numbers(1)),
    ("state", {"key": "step", "each": False, "pieces": [0, 1], "values": [1]}, None),
    ("state", {"key": "step", "each": False, "pieces": [0], "values": [1], "dtype": "os"}, None),
    ("init", init_args([[0, SIZE + 1, 0]]), numbers(1)),
    ("init", init_args([[0, 4, 0], [3, 4, 0]]), numbers(1)),
    ("init", init_args([[0, 4, 2]]), numbers(1)),
    ("init", init_args([[0, 4, 0]], optimizer={"kind": "Evil", "groups": [{}]}), numbers(1)),
    ("init", init_args([[0, 4, 0]], optimizer={"kind": "Adam", "groups": [{"betas": [0.9]}]}), numbers(1)),
    ("init", init_args([[0, 4, 0]], aggregate="worst"), numbers(1)),
    ("init", init_args([[0, 4]]), numbers(1)),
    ("init", init_args(), None),
    ("format", {}, None),
]


@st.composite
def operations(draw: st.DrawFn) -> Operation:
    kind = draw(st.sampled_from(["stage"] * 4 + ["apply"] * 3 + ["drop", "bad", "bad"]))
    step = draw(st.integers(0, 3))
    if kind == "bad":
        name, args, tensor = draw(st.sampled_from(BAD))
        return Operation(name, draw(st.sampled_from([step, step + 90])), args, tensor)
    if kind == "stage":
        part, micro, seed = draw(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 99)))
        return Operation("stage", step, {"part": part, "micro": micro}, numbers(seed))
    parts = draw(st.sets(st.integers(0, 3), max_size=4))
    floor = draw(st.sampled_from([0, 0, 0, 1, 2]))
    if kind == "drop":
        return Operation("drop", step, {"parts": sorted(parts), "floor": floor})
    used = draw(st.sampled_from([None, [0], [1, 2], []]))
    rates = draw(st.sampled_from([None, [{"lr": 0.5}, {"lr": 0.1, "betas": [0.5, 0.7]}]]))
    return Operation("apply", step, update(sorted(parts), used=used, settings=rates, floor=floor, factor=0.5))


def run(made: Dense, op: Operation) -> Any:
    try:
        return made.apply(op).value
    except Refused as refused:
        return str(refused)


CASES = st.tuples(
    st.sampled_from(["weighted", "median"]), st.booleans(), st.lists(operations(), min_size=1, max_size=25)
)


@settings(max_examples=150, deadline=None)
@given(case=CASES, cut=st.integers(0, 24))
def test_replicas_and_restored_ones_are_equal_and_refusals_change_nothing(case: Any, cut: int) -> None:
    aggregate, hold, sequence = case
    first, second = (machine("adamw", aggregate, hold) for _ in range(2))
    restored: Dense | None = None
    for index, op in enumerate(sequence):
        if index == cut:
            value, tensor = first.snapshot()
            restored = machine("sgd")  # to be replaced by all that comes
            restored.restore(json.loads(json.dumps(value)), tensor.clone())
            tensor.zero_()
        before = state(first)
        counted = [[part, 1] for part in range(3)]
        for name in ("gradient", "squares"):  # questions to one replica alone must not change what it does
            with contextlib.suppress(Refused):
                first.answer(Operation(name, op.clock, {"parts": counted, "ranges": [[0, 3]]}))
        assert state(first) == before
        result = run(first, op)
        if isinstance(result, str) or result.get("dup"):
            assert state(first) == before
        assert run(second, op) == result
        assert state(second) == state(first)
        if restored is not None:
            assert run(restored, op) == result
            assert state(restored) == state(first)


@pytest.mark.parametrize("bad", range(len(BAD)))
def test_each_bad_operation_is_refused(bad: int) -> None:
    made = machine()
    stage(made, 0, 0, numbers(1))
    before = state(made)
    name, args, tensor = BAD[bad]
    with pytest.raises(Refused, match=r"\.$"):
        made.apply(Operation(name, 0, args, tensor))
    assert state(made) == before
    assert torch.equal(values(made), numbers(0))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("values", {"applied": -1}),
        ("gradient", {"parts": [0]}),
        ("squares", {"parts": [[0, 1]], "ranges": [[0, SIZE + 1]]}),
        ("state", {"key": "exp_avg"}),
        ("secrets", {}),
    ],
)
def test_bad_questions(name: str, args: Any) -> None:
    made = machine()
    stage(made, 0, 0, numbers(1))
    with pytest.raises(Refused, match=r"\.$"):
        made.answer(Operation(name, 0, args))


def test_what_was_summed_cannot_be_taken_apart() -> None:
    made = machine()
    for part in (0, 1, 3):
        stage(made, 0, part, numbers(part + 1))
    for parts in ([0], [1], [1, 3]):
        with pytest.raises(Refused, match="in one sum with those named"):
            act(made, 0, parts)
    act(made, 0, [3])  # it waits by itself
    reference = Reference("adamw")
    reference.step(numbers(4))
    assert torch.equal(values(made), reference.values)
    with pytest.raises(Refused, match=r"parts \[3\] are done and others named with them are not"):
        act(made, 0, [0, 1, 3])
    act(made, 0, [0, 1])
    reference.step(numbers(1) + numbers(2))
    assert torch.equal(values(made), reference.values)


@pytest.mark.parametrize("aggregate", ["weighted", "median"])
def test_a_gradient_that_was_looked_at_is_not_used_too_long(aggregate: str) -> None:
    made, other = (machine(aggregate=aggregate, hold=True) for _ in range(2))
    both, counted = (made, other), [[0, 1], [1, 1]]
    for one in both:
        stage(one, 0, 0, numbers(1))
        stage(one, 0, 1, numbers(2))
    early = ask(made, "gradient", parts=counted).tensor
    for one in both:
        stage(one, 0, 1, numbers(3), micro=1)
    assert not torch.equal(ask(made, "gradient", parts=counted).tensor, early)
    ask(made, "gradient", parts=[[0, 1], [1, 7]])
    for one in both:
        act(one, 0, [0, 1])
        with pytest.raises(Refused, match="their gradients are gone"):
            ask(one, "gradient", parts=counted)
        for step in (1, 2):
            for part in range(2):
                stage(one, step, part, numbers(step + part))
    ask(made, "gradient", 1, parts=counted)
    for one in both:
        act(one, 1, [0, 1])
        with pytest.raises(Refused, match="their gradients are gone"):
            ask(one, "gradient", 1, parts=counted)
    ask(made, "gradient", 2, parts=counted)
    for one in both:
        one.apply(Operation("drop", 2, {"parts": [0, 1], "floor": 0}))
    with pytest.raises(Refused, match="their gradients are gone"):
        ask(made, "gradient", 2, parts=counted)
    assert state(made) == state(other)
    assert made._shard is not None
    free = [vector.data_ptr() for vector in made._shard.staged.pool._free]
    assert len(free) == len(set(free)), "each is given back once"


def test_before_init() -> None:
    with pytest.raises(Refused, match="came before init"):
        stage(Dense(), 0, 0, numbers(1))
    value, tensor = Dense().snapshot()
    made = machine()
    made.restore(value, tensor)
    assert made.snapshot()[0] is None


@pytest.mark.parametrize(("aggregate", "most"), [("weighted", 2), ("median", 5)])
def test_steps_in_a_row_take_no_new_memory(aggregate: str, most: int) -> None:
    made = machine(aggregate=aggregate)
    rng = np.random.default_rng(0)
    addresses: list[set[int]] = []
    shard = made._shard
    assert shard is not None
    for step in range(12):
        for part in (0, 1, 3, 2) if aggregate == "weighted" else rng.permutation(4):
            stage(made, step, int(part), numbers(step))
        act(made, step, range(4), floor=step)
        addresses.append({t.data_ptr() for t in shard.staged.pool._free})
        assert len(shard.staged.pool._free) == most
        assert len(made.snapshot()[0]["done"]) == 1, "what is below the floor is forgotten"
    assert all(found == addresses[0] for found in addresses)

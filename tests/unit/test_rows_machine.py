"""The machine of a table of rows, held to a slow one of dicts; and what it promises about bits, memory and refusals."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn, optim

from shoal.server.protocol.state_machine import Operation, Refused
from shoal.server.rows.growing_matrix import GrowingMatrix
from shoal.server.rows.initial_values import inverse_normal, keyed_rows
from shoal.server.rows.row_machine import RowMachine, pack, unpack
from shoal.server.rows.row_packing import divide, shard_of
from shoal.server.rows.slot_map import ABSENT, Slots
from shoal.testing.spawn import spawn
from shoal.world.world import World

ROWS, DIM = 40, 3
ADAM = {"kind": "AdamW", "groups": [{"lr": 0.05, "weight_decay": 0.1}]}
SGD = {"kind": "SGD", "groups": [{"lr": 0.5}]}
IDS = st.lists(st.integers(0, ROWS - 1), max_size=12, unique=True)


def made(**changes: Any) -> RowMachine:
    terms = {
        "name": "t",
        "rows": ROWS,
        "dim": DIM,
        "dtype": "float64",
        "seed": 3,
        "std": 0.5,
        "optimizer": ADAM,
    }
    machine = RowMachine()
    machine.apply(Operation("init", 0, {**terms, **changes}))
    return machine


def gradient_for(step: int, part: int, ids: list[int], dim: int = DIM) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    return torch.randn(len(ids), dim, dtype=torch.float64, generator=generator)


def stage(machine: RowMachine, step: int, part: int, ids: list[int]) -> Any:
    packed = pack(torch.tensor(ids, dtype=torch.int64), gradient_for(step, part, ids))
    value = machine.apply(Operation("stage", step, {"part": part}, packed)).value
    packed.fill_(255)  # it was borrowed: whoever still looks at it is found out
    return value


def update(machine: RowMachine, step: int, parts: list[int], **args: Any) -> Any:
    return machine.apply(Operation("apply", step, {"parts": [[part, 1] for part in parts], **args})).value


def train(machine: RowMachine, step: int, ids: list[int], **args: Any) -> None:
    stage(machine, step, 0, ids)
    update(machine, step, [0], **args)


def read(machine: RowMachine, ids: Any = range(ROWS)) -> torch.Tensor:
    answer = machine.answer(Operation("rows", tensor=torch.tensor(list(ids), dtype=torch.int64)))
    assert answer is not None
    assert answer.tensor is not None
    return answer.tensor.view(len(ids), -1)


def facts(machine: RowMachine) -> dict[str, Any]:
    answer = machine.answer(Operation("facts"))
    assert answer is not None
    found: dict[str, Any] = answer.value
    return found


def copied(machine: RowMachine) -> RowMachine:
    value, tensor = machine.snapshot()
    other = RowMachine()
    other.restore(value, tensor.clone())
    return other


def same(one: RowMachine, other: RowMachine) -> bool:
    (value, tensor), (others_value, others_tensor) = one.snapshot(), other.snapshot()
    return bool(value == others_value) and torch.equal(tensor, others_tensor)


class Slow:
    """What a table is, one row at a time: a parameter and an optimizer of torch for each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.rows: dict[int, tuple[nn.Parameter, optim.Optimizer]] = {}
        self.clock: dict[int, int] = {}
        self.staged: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        self.done: set[tuple[int, int]] = set()
        self.now = self.evicted = 0

    def first(self, id: int) -> torch.Tensor:
        return keyed_rows(3, "t", np.array([id]), DIM, 0.5, torch.float64)[0]

    def stage(self, step: int, part: int, ids: list[int]) -> bool:
        if (step, part) in self.done or (step, part) in self.staged:
            return False
        self.staged[step, part] = dict(zip(ids, gradient_for(step, part, ids), strict=True))
        return True

    def update(self, step: int, parts: list[int], factor: float, limit: float | None) -> None:
        total: dict[int, torch.Tensor] = {}
        for part in sorted(parts):
            for id, row in self.staged.pop((step, part)).items():
                total[id] = total.get(id, torch.zeros(DIM, dtype=torch.float64)) + row
            self.done.add((step, part))
        self.now = max(self.now, step) if total else self.now
        for id, gradient in total.items():
            if id not in self.rows:
                row = nn.Parameter(self.first(id).clone())
                self.rows[id] = row, optim.AdamW([row], lr=0.05, weight_decay=0.1)
            row, optimizer = self.rows[id]
            row.grad = gradient * factor
            if limit is not None:
                row.grad.clamp_(-limit, limit)
            optimizer.step()
            self.clock[id] = self.now
        for id in sorted(self.rows, key=lambda id: (self.clock[id], id))[
            : max(0, len(self.rows) - self.capacity)
        ]:
            if self.capacity:
                del self.rows[id], self.clock[id]
                self.evicted += 1

    def read(self) -> torch.Tensor:
        return torch.stack(
            [self.rows[id][0].detach() if id in self.rows else self.first(id) for id in range(ROWS)]
        )


STEPS = st.lists(
    st.tuples(
        st.lists(IDS, min_size=1, max_size=4),  # the ids of each part
        st.sampled_from(["together", "one by one", "backwards", "drop", "twice", "restart"]),
        st.sampled_from([1.0, 0.25]),
        st.sampled_from([None, 0.3]),
    ),
    max_size=12,
)


@settings(max_examples=50, deadline=None)
@given(steps=STEPS, capacity=st.sampled_from([0, 1, 5, 20]))
def test_it_is_what_dicts_would_be(steps: Any, capacity: int) -> None:
    fast, slow = made(capacity=capacity), Slow(capacity)
    for step, (parts, how, factor, limit) in enumerate(steps):
        for part, ids in enumerate(parts):
            slow.stage(step, part, ids)
            assert stage(fast, step, part, ids) == {}
        if how == "restart":
            fast = copied(fast)
        everyone = list(range(len(parts)))
        if how == "drop":
            fast.apply(Operation("drop", step, {"parts": everyone, "floor": step}))
            slow.staged.clear()
            assert update(fast, step, everyone) == {"dup": True}
        elif how in ("one by one", "backwards"):
            for part in everyone if how == "one by one" else reversed(everyone):
                update(fast, step, [part], factor=factor, limit=limit)
                slow.update(step, [part], factor, limit)
        else:
            update(fast, step, everyone[::-1], factor=factor, limit=limit)
            slow.update(step, everyone, factor, limit)
        if how == "twice":
            assert update(fast, step, everyone, factor=9.0) == {"dup": True}
            assert stage(fast, step, 0, [1]) == {"dup": True}
        torch.testing.assert_close(read(fast), slow.read(), rtol=1e-12, atol=1e-12)
        found = facts(fast)
        assert (found["rows"], found["evicted"], found["staged"]) == (len(slow.rows), slow.evicted, 0)
        assert fast.metrics()["evicted"] == slow.evicted


@settings(max_examples=50, deadline=None)
@given(parts=st.lists(IDS, min_size=2, max_size=4), order=st.randoms(use_true_random=False))
def test_the_order_of_arrival_changes_no_bit(parts: list[list[int]], order: Any) -> None:
    """Nor does the order of the ids within a part."""
    one, other = made(), made()
    for step in range(3):
        for part, ids in enumerate(parts):
            stage(one, step, part, ids)
        update(one, step, list(range(len(parts))))
        for part in order.sample(range(len(parts)), len(parts)):
            ids, rows = torch.tensor(parts[part], dtype=torch.int64), gradient_for(step, part, parts[part])
            mixed = torch.tensor(order.sample(range(len(ids)), len(ids)), dtype=torch.int64)
            other.apply(Operation("stage", step, {"part": part}, pack(ids[mixed], rows[mixed])))
        update(other, step, list(range(len(parts)))[::-1])
    assert same(one, other)


@settings(max_examples=50, deadline=None)
@given(steps=STEPS, cut=st.integers(0, 12), capacity=st.sampled_from([0, 4]))
# The newcomer had no list of candidates, evicted in one go where the other did so in two, and rows lay elsewhere.
@example(
    steps=[
        ([[]], "together", 1.0, None),
        ([[0, 1, 2, 3, 5]], "together", 1.0, None),
        ([[0, 4]], "together", 1.0, None),
        ([[0, 1, 2, 3]], "together", 1.0, None),
    ],
    cut=3,
    capacity=4,
)
def test_replicas_are_equal_to_the_bit(steps: Any, cut: int, capacity: int) -> None:
    """One is fed from the start, one joins somewhere with a snapshot, between staging and update."""
    whole = made(capacity=capacity)
    joined: RowMachine | None = None
    for step, (parts, _, factor, limit) in enumerate(steps):
        for part, ids in enumerate(parts):
            for machine in (whole, joined) if joined else (whole,):
                stage(machine, step, part, ids)
            if step == cut and part == 0:
                joined = copied(whole)
        for machine in (whole, joined) if joined else (whole,):
            update(machine, step, list(range(len(parts))), factor=factor, limit=limit, floor=step - 1)
    if joined:
        assert same(whole, joined)
    assert same(whole, copied(whole))


def pieces(machine: RowMachine, limit: int) -> list[tuple[Any, torch.Tensor]]:
    last, found = -1, []
    while True:
        answer = machine.answer(Operation("dump", 0, {"after": last, "limit": limit}))
        assert answer is not None
        assert answer.tensor is not None
        if not answer.value["count"]:
            return found
        last = answer.value["last"]
        found.append((answer.value, answer.tensor))


@settings(max_examples=25, deadline=None)
@given(
    touched=st.lists(IDS, max_size=6),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    limit=st.integers(1, 50),
)
def test_a_dump_goes_into_other_shards(touched: list[list[int]], before: int, after: int, limit: int) -> None:
    def spread(machines: list[RowMachine], step: int, ids: list[int]) -> None:
        owners = shard_of(np.array(ids, dtype=np.int64), len(machines))
        gradient = gradient_for(step, 0, ids)
        for shard, machine in enumerate(machines):
            mine = torch.tensor([at for at, owner in enumerate(owners) if owner == shard], dtype=torch.int64)
            own = pack(torch.tensor(ids, dtype=torch.int64)[mine], gradient[mine])
            machine.apply(Operation("stage", step, {"part": 0}, own))
            update(machine, step, [0])

    def whole(machines: list[RowMachine]) -> torch.Tensor:
        owners = shard_of(np.arange(ROWS), len(machines))
        return torch.stack([read(machines[owner], [id])[0] for id, owner in enumerate(owners)])

    old, new = [made() for _ in range(before)], [made() for _ in range(after)]
    for step, ids in enumerate(touched):
        spread(old, step, ids)
    for machine in old:
        for value, packed in pieces(machine, limit):
            for target, (own, bytes_) in zip(new, divide(value, packed, after), strict=True):
                target.apply(Operation("load", 0, own, bytes_))
    assert torch.equal(whole(old), whole(new))
    for step, ids in enumerate(touched):  # the state has come along
        spread(old, len(touched) + step, ids)
        spread(new, len(touched) + step, ids)
    torch.testing.assert_close(whole(old), whole(new), rtol=1e-14, atol=1e-14)


def test_the_oldest_rows_go_and_come_back_as_they_first_were() -> None:
    machine = made(capacity=3)
    first = read(machine)
    train(machine, 0, [1, 2])
    train(machine, 1, [2, 7])
    train(machine, 2, [9, 8])  # 1 is oldest; then 2 and 7 of step 1, the lower id first
    assert facts(machine)["evicted"] == 2
    assert torch.equal(read(machine, [1, 2]), first[[1, 2]])
    assert all(not torch.equal(read(machine, [id]), first[[id]]) for id in (7, 8, 9))
    train(machine, 3, [1])
    alone = made()
    stage(alone, 3, 0, [1])
    update(alone, 3, [0])
    assert torch.equal(read(machine, [1]), read(alone, [1])), "its state begins anew too"


def test_more_rows_than_the_capacity_in_one_step() -> None:
    machine = made(capacity=4)
    first = read(machine)
    train(machine, 5, list(range(10)))
    changed = (read(machine) != first).any(dim=1).nonzero().view(-1).tolist()
    assert changed == [6, 7, 8, 9]


def test_reads_change_nothing() -> None:
    machine = made()
    train(machine, 0, [4])
    before = machine.snapshot()[1].clone()
    assert read(machine, [4, 4, 5, 39]).shape == (4, DIM)
    assert torch.equal(machine.snapshot()[1], before)
    assert facts(machine)["rows"] == 1


def test_reads_wait_for_steps() -> None:
    machine = made()
    question = Operation("rows", 1, {"applied": 1}, torch.tensor([4]))
    assert machine.answer(question) is None
    train(machine, 0, [4])
    assert machine.answer(question) is not None
    late = RowMachine()
    late.apply(Operation("init", 100, {**machine.snapshot()[0]["terms"]}))
    assert late.answer(Operation("rows", 100, {"applied": 100}, torch.tensor([4]))) is not None


def test_an_init_that_comes_late_changes_nothing() -> None:
    machine = made()
    machine.apply(Operation("init", 0, machine.snapshot()[0]["terms"]))
    train(machine, 0, [4])
    value, before = machine.snapshot()
    machine.apply(Operation("init", 0, value["terms"]))
    assert machine.snapshot()[0] == value
    assert torch.equal(machine.snapshot()[1], before)


def test_the_gradient_can_be_looked_at() -> None:
    machine = made()
    stage(machine, 0, 0, [4, 9])
    stage(machine, 0, 1, [9])
    parts = {"parts": [[0, 5], [1, 5]]}
    answer, squares = (machine.answer(Operation(name, 0, parts)) for name in ("gradient", "squares"))
    assert answer is not None
    assert squares is not None
    ids, rows = unpack(answer.tensor, DIM, torch.float64)
    wanted = gradient_for(0, 0, [4, 9])
    wanted[1] += gradient_for(0, 1, [9])[0]
    assert ids.tolist() == [4, 9]
    assert torch.equal(rows, wanted)
    assert squares.value == [pytest.approx(float((wanted**2).sum()))]


def test_a_question_waits_for_the_parts_it_is_about() -> None:
    machine, parts = made(), {"parts": [[0, 5], [1, 5]]}
    stage(machine, 0, 0, [4])
    for name in ("gradient", "squares"):
        assert machine.answer(Operation(name, 0, parts)) is None
    stage(machine, 0, 1, [9])
    for name in ("gradient", "squares"):
        assert machine.answer(Operation(name, 0, parts)) is not None
    update(machine, 0, [0, 1])
    with pytest.raises(Refused):
        machine.answer(Operation("gradient", 0, parts))


def test_the_floor_prunes() -> None:
    machine = made()
    for step in range(20):
        stage(machine, step, 0, [step])
        stage(machine, step, 1, [step])  # a spare that is never used
        update(machine, step, [0], floor=step)
    assert facts(machine)["staged"] == 1
    assert machine.snapshot()[0]["parts"]["done"] == [(19, [0])]
    assert stage(machine, 3, 1, [3]) == {"dup": True}
    assert update(machine, 3, [1]) == {"dup": True}


def test_settings_change_with_a_schedule() -> None:
    machine = made(optimizer=SGD, std=0.0)
    train(machine, 0, [4], settings=[{"lr": 0.25}], share=0.5)
    assert torch.equal(read(machine, [4]), -0.125 * gradient_for(0, 0, [4]))
    assert copied(machine).snapshot()[0]["settings"] == {"lr": 0.25}


REFUSED: list[tuple[str, Any, Any, str]] = [
    ("stage", {"part": 1}, None, "one flat tensor of bytes"),
    ("stage", {"part": 1}, torch.zeros(5, dtype=torch.uint8), "one flat tensor of bytes"),
    ("stage", {"part": 1}, torch.zeros(16), "one flat tensor of bytes"),
    ("stage", {"part": 1}, pack(torch.tensor([1]), torch.zeros(1, 4)), "1 rows of 4 numbers"),
    ("stage", {"part": 1}, pack(torch.tensor([1]), torch.zeros(1, 3)), r"48 bytes .* 40 came"),
    ("stage", {"part": 1}, pack(torch.tensor([1]), torch.zeros(1, 3).double())[:-8], "40 came"),
    ("stage", {"part": 1}, pack(torch.tensor([5, 1, 5]), torch.zeros(3, 3).double()), "id 5 came twice"),
    ("stage", {"part": 1}, pack(torch.tensor([ROWS]), torch.zeros(1, 3).double()), "ids from 40 to 40"),
    ("stage", {"part": 1}, pack(torch.tensor([-1]), torch.zeros(1, 3).double()), "ids from -1"),
    ("stage", {}, pack(torch.tensor([1]), torch.zeros(1, 3).double()), "part=None"),
    ("stage", None, None, "part=None"),
    ("apply", {"parts": [[0, 1], [1, 1]]}, None, "part 1 of step 1 is not staged"),
    ("apply", {"parts": 3}, None, "parts 3"),
    ("apply", {"parts": [[0, 1]], "factor": "x"}, None, "factor='x'"),
    ("apply", {"parts": [[0, 1]], "settings": [{"lr": 1.0, "amsgrad": True}]}, None, "need max_exp_avg_sq"),
    ("apply", {"parts": [[0, 1]], "settings": []}, None, "one group"),
    ("load", {}, None, "does not say what it holds"),
    (
        "load",
        {"count": 1, "columns": [["id", "int64", 1]]},
        torch.zeros(8, dtype=torch.uint8),
        "came for a table",
    ),
    (
        "load",
        {"count": 1, "columns": [["id", "int64", 1], ["x", "int64", -1]]},
        torch.zeros(0, dtype=torch.uint8),
        "say",
    ),
    ("init", {"name": "t"}, None, "a table cannot be made"),
    ("init", {**made().snapshot()[0]["terms"], "dtype": "int8"}, None, "a dtype of float32"),
    (
        "init",
        {**made().snapshot()[0]["terms"], "optimizer": {"kind": "Rprop", "groups": [{}]}},
        None,
        "Rprop has no",
    ),
    ("jump", {}, None, "cannot 'jump'"),
]


@pytest.mark.parametrize(("name", "args", "tensor", "words"), REFUSED)
def test_what_is_wrong_changes_nothing(name: str, args: Any, tensor: Any, words: str) -> None:
    machine = made()
    train(machine, 0, [1, 2])
    stage(machine, 1, 0, [3])
    before = copied(machine)
    with pytest.raises(Refused, match=words):
        machine.apply(Operation(name, 1, args, tensor))
    assert same(machine, before)


def test_before_init_there_is_nothing() -> None:
    machine = RowMachine()
    for call in (machine.apply, machine.answer):
        with pytest.raises(Refused):
            call(Operation("rows"))
    with pytest.raises(Refused, match="send it init first"):
        machine.apply(Operation("stage"))
    assert machine.metrics() == {}
    assert same(machine, copied(machine))


def test_bytes_may_begin_anywhere() -> None:
    packed = pack(torch.tensor([7, 3]), torch.arange(6.0).view(2, 3))
    shifted = torch.zeros(len(packed) + 3, dtype=torch.uint8)[3:]
    shifted.copy_(packed)
    ids, rows = unpack(shifted, 3, torch.float32)
    assert ids.tolist() == [7, 3]
    assert rows.tolist() == [[0, 1, 2], [3, 4, 5]]


# The pieces it is made of.


@settings(max_examples=100, deadline=None)
@given(
    batches=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 2**62), max_size=60, unique=True)), max_size=20
    )
)
def test_slots_are_a_dict(batches: Any) -> None:
    slots, wanted, numbers = Slots(), dict[int, int](), itertools.count()
    for add, ids in batches:
        if add:
            new = {id: next(numbers) for id in ids if id not in wanted}
            slots.add(np.array(list(new), dtype=np.int64), np.array(list(new.values()), dtype=np.int64))
            wanted.update(new)
        else:
            gone = list(wanted)[::2]
            slots.remove(np.array(gone, dtype=np.int64))
            for id in gone:
                del wanted[id]
        asked = np.array([*ids, *wanted], dtype=np.int64)
        assert slots.find(asked).tolist() == [wanted.get(int(id), ABSENT) for id in asked]
        assert len(slots) == len(wanted)


def test_slots_survive_coming_and_going() -> None:
    """Places that were left are used again: the map of a steady number of rows does not grow."""
    slots, generator = Slots(), np.random.default_rng(0)
    held = generator.choice(10**9, 5000, replace=False)
    slots.add(held, np.arange(5000))
    for _ in range(200):
        slots.remove(held[:500])
        fresh = np.setdiff1d(generator.choice(10**9, 500, replace=False), held)
        slots.add(fresh, np.arange(fresh.size))
        held = np.concatenate([held[500:], fresh])
    assert (slots.find(held) != ABSENT).all()
    assert slots.nbytes <= 12 * 2**14


def test_ids_of_one_shard_do_not_meet() -> None:
    """Ids come here by their hash; were the map to use the same hash, all would want the same places."""
    ids = np.arange(400_000)
    ids = ids[shard_of(ids, 64) == 3]
    slots = Slots()
    slots.add(ids, np.arange(ids.size))
    assert np.unique(slots._home(ids)).size > 0.7 * ids.size


def test_keyed_rows_are_normal_and_stay_what_they_are() -> None:
    rows = keyed_rows(0, "words", np.arange(100_000), 5, 0.5, torch.float64)
    assert abs(float(rows.mean())) < 0.004
    assert float(rows.std()) == pytest.approx(0.5, rel=0.005)
    shares = [float((rows < 0.5 * bound).double().mean()) for bound in (-3.0, -1.0, 1.0, 3.0)]
    assert shares == pytest.approx([0.00135, 0.15866, 0.84134, 0.99865], abs=0.002)
    assert float(torch.corrcoef(rows.T).fill_diagonal_(0).abs().max()) < 0.02
    # Part of every model: these may never change.
    assert keyed_rows(0, "words", np.array([0, 10**12]), 3, 1.0, torch.float32).tolist() == GOLDEN
    assert not torch.equal(rows[:9], keyed_rows(1, "words", np.arange(9), 5, 0.5, torch.float64))
    assert not torch.equal(rows[:9], keyed_rows(0, "other", np.arange(9), 5, 0.5, torch.float64))


GOLDEN = [
    [0.06918276846408844, 0.5526500940322876, 1.094379186630249],
    [-1.7610509395599365, -0.38176459074020386, 1.2223796844482422],
]


def test_the_inverse_is_that_of_the_normal_distribution() -> None:
    powers = 2.0 ** -np.arange(1, 33)
    shares = np.concatenate([np.linspace(0, 1, 4001)[1:-1], powers, 1 - powers, [0.02425, 0.97575]])
    wanted = [NormalDist().inv_cdf(share) for share in shares]
    assert inverse_normal(shares) == pytest.approx(np.array(wanted), rel=2e-9, abs=2e-9)


def test_a_column_grows_beside_a_view() -> None:
    column = GrowingMatrix(torch.bfloat16, 3)
    column.resize(2)
    column.put(torch.tensor([1]), torch.ones(1, 3, dtype=torch.bfloat16))
    view = column.tensor
    column.resize(100_000)
    assert column.tensor[:3].tolist() == [[0] * 3, [1] * 3, [0] * 3]
    assert view.tolist() == [[0] * 3, [1] * 3]
    column.resize(1)
    column.resize(2)
    assert column.tensor.tolist() == [[0] * 3, [0] * 3], "a row that is new is zero"


def resident() -> int:
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps of batches that are gone is held by nobody
    return 4096 * int(Path("/proc/self/statm").read_text().split()[1])


def test_a_million_rows_take_what_their_numbers_take() -> None:
    spawn(_take_a_million, 1)  # in a process of its own: what tests before have left free would be counted


def _take_a_million(world: World) -> None:
    del world
    dim, count, each = 16, 1_000_000, 100_000
    machine = made(
        rows=10**9, dim=dim, dtype="float32", optimizer={"kind": "Adagrad", "groups": [{"lr": 0.1}]}
    )
    gradient = torch.ones(each, dim)
    before = resident()
    for step in range(count // each):
        ids = torch.arange(step * each, (step + 1) * each) * 997
        machine.apply(Operation("stage", step, {"part": 0}, pack(ids, gradient)))
        update(machine, step, [0], floor=step + 1)
    taken = count * (2 * dim * 4 + 20)  # rows and sums; id, clock and count of steps
    found = facts(machine)
    assert found["rows"] == count
    assert found["bytes"] < 1.3 * taken + 40 * count
    assert resident() - before < 1.4 * taken + 60 * count

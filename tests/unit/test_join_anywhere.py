"""A copy that joins from a snapshot is the copy that was there all along, wherever in a history it joins.

At every point of a random history one more copy joins, through the bytes of the wire. From then on it gets what all
get; in the end all snapshots are the same bytes, and so is every answer on the way. Questions go to the first copy
alone now and then: what a machine remembers of them must not decide anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgpack
import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn, optim

from shoal.compress import make_compressor
from shoal.compress.base import Layout
from shoal.config import parse_choice
from shoal.optimizer import ELEMENTWISE
from shoal.server.dense.dense_machine import Dense
from shoal.server.ledger.ledger_machine import Ledger
from shoal.server.protocol.encoded_gradient import turn_of
from shoal.server.protocol.messages import Message, MessageKind
from shoal.server.protocol.optimizer_description import describe
from shoal.server.protocol.session import attempt
from shoal.server.protocol.state_machine import Machine, Operation
from shoal.server.rows.row_machine import RowMachine, pack
from shoal.server.rows.row_optimizers import RULES
from shoal.server.transport.frames import CODED

EXAMPLES = 60
ASK = "?"
"""Before the name of an operation: a question, to the first copy alone."""


def wire(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def state(machine: Machine) -> tuple[bytes, bytes]:
    value, tensor = machine.snapshot()
    return wire(value), tensor.numpy().tobytes()


def joined(machine: Machine) -> Machine:
    value, tensor = machine.snapshot()
    copy = type(machine)()
    copy.restore(msgpack.unpackb(wire(value), raw=False), tensor.clone())
    return copy


def outcome(do: Callable[[Operation], Any], op: Operation) -> tuple[int, Any, Any]:
    """What a client is told, with the numbers as bytes."""
    tensor = None if op.tensor is None else op.tensor.clone()
    meta = msgpack.unpackb(wire([op.name, op.args]), raw=False)
    kind = MessageKind.CALL
    message = Message(kind, client=op.client, clock=op.clock, meta=meta, tensor=tensor, codec=op.codec)
    status, answer = attempt(do, message)
    if tensor is not None:
        tensor.view(torch.uint8).fill_(255)  # it was borrowed
    if answer is None:
        return status, None, None
    numbers = (
        None if answer.tensor is None else answer.tensor.contiguous().view(torch.uint8).numpy().tobytes()
    )
    return status, wire(answer.value), numbers


def live(machine: Machine, history: Sequence[Operation], questions: Sequence[Operation]) -> None:
    """Run a history on a machine and on a copy that joins before each of its operations."""
    copies = [machine]
    for op in history:
        if op.name.startswith(ASK):
            before = state(machine)
            outcome(machine.answer, Operation(op.name[1:], op.clock, op.args, op.tensor, op.client))
            assert state(machine) == before, "a question changed something"
            continue
        copies.append(joined(machine))
        expected, *others = [outcome(copy.apply, op) for copy in copies]
        for place, other in enumerate(others):
            assert other == expected, f"the copy that joined at {place} says something else to {op}"
    expected_state = state(machine)
    for place, copy in enumerate([*copies[1:], joined(machine)]):
        assert state(copy) == expected_state, f"the copy that joined at {place} differs"
    for question in questions:
        expected, *others = [outcome(copy.answer, question) for copy in copies]
        assert all(other == expected for other in others), question


# Dense.

SIZE = 12
PIECES = [[0, 5, 0], [5, 3, 1], [8, 2, 0]]
STEPS = st.integers(0, 4)
PARTS = st.lists(st.integers(0, 2), max_size=3, unique=True).map(sorted)
EXTRAS: dict[type[optim.Optimizer], list[dict[str, Any]]] = {
    optim.SGD: [{}, {"momentum": 0.9, "nesterov": True}],
    optim.Adam: [{}, {"amsgrad": True}],
    optim.RMSprop: [{}, {"momentum": 0.5, "centered": True}],
    optim.Adagrad: [{"initial_accumulator_value": 0.5, "lr_decay": 0.1}],
}
OPTIMIZERS = [(kind, extra) for kind in ELEMENTWISE for extra in EXTRAS.get(kind, [{}])]
CODES = ["", "int8", "topk(0.4)", "randomk(0.5)"]
KEYS = ["exp_avg", "exp_avg_sq", "momentum_buffer", "square_avg", "sum"]


def vector(seed: int, size: int = SIZE) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def dense_init(
    case: tuple[type[optim.Optimizer], dict[str, Any]], aggregate: str, hold: bool, code: str
) -> Any:
    kind, extra = case
    made: Any = kind
    shell = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = describe(made([shell[0], {**shell[1], "lr": 0.03}], lr=0.1, **extra))
    return {"pieces": PIECES, "optimizer": optimizer, "aggregate": aggregate, "hold": hold, "code": code}


def coded(code: str, seed: int, step: int, micro: int) -> torch.Tensor:
    made = make_compressor(parse_choice(code, "compressor")).code(
        Layout(SIZE, torch.float32, torch.device("cpu"))
    )
    payload = made.payload()
    made.encode(vector(seed), payload, turn_of(step, micro))
    return payload


@st.composite
def dense_operation(draw: st.DrawFn, init: Any) -> Operation:
    step, parts = draw(STEPS), draw(PARTS)
    counted = [[part, draw(st.sampled_from([1.0, 3.0]))] for part in parts]
    name = draw(
        st.sampled_from(["stage"] * 5 + ["apply"] * 3 + ["drop", "state", "init", "?gradient", "?squares"])
    )
    if name == "init":
        return Operation(name, step, init, vector(draw(st.integers(0, 9))))
    if name == "state":
        args = {"key": draw(st.sampled_from(KEYS)), "each": True, "pieces": draw(PARTS), "values": None}
        if draw(st.booleans()):
            args = {**args, "key": "step", "each": False, "values": [2.0] * len(args["pieces"])}
        return Operation(name, step, args, vector(3).abs() if args["each"] else None)
    if name == "stage":
        micro, seed = draw(st.integers(0, 1)), draw(st.integers(0, 9))
        args = {"part": draw(st.integers(0, 2)), "micro": micro}
        if init["code"] and draw(st.booleans()):
            return Operation(name, step, args, coded(init["code"], seed, step, micro), codec=CODED)
        return Operation(name, step, args, vector(seed))
    if name.startswith(ASK):
        return Operation(name, step, {"parts": counted, "ranges": [[0, 5], [5, SIZE]]})
    floor = draw(st.sampled_from([0, 0, step, step + 1]))
    args = {"parts": counted, "floor": floor, "norm": draw(st.sampled_from([None, 1.5]))}
    if name == "apply":
        args["settings"] = draw(st.sampled_from([None, None, [{"lr": 0.5}, {"lr": 0.25}]]))
        args["used"] = draw(st.sampled_from([None, None, [0], [1, 2]]))
        args.update(factor=draw(st.sampled_from([1.0, 0.3])), limit=draw(st.sampled_from([None, 0.2])))
        args.update(share=draw(st.sampled_from([1.0, 0.5])), keep=draw(st.booleans()))
    return Operation(name, step, args)


@st.composite
def dense_history(draw: st.DrawFn) -> list[Operation]:
    code, aggregate = draw(st.sampled_from(CODES)), draw(st.sampled_from(["weighted", "median"]))
    init = dense_init(draw(st.sampled_from(OPTIMIZERS)), aggregate, draw(st.booleans()), code)
    first = Operation("init", draw(st.sampled_from([0, 0, 1])), init, vector(0))
    return [first, *draw(st.lists(dense_operation(init), max_size=14))]


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=dense_history())
# The kept gradient was not in the snapshot: whoever joined after its update refused to say what the others said.
@example(
    history=[
        Operation("init", 0, dense_init((optim.SGD, {}), "weighted", False, ""), vector(0)),
        Operation("stage", 0, {"part": 0}, vector(1)),
        Operation("apply", 0, {"parts": [[0, 1.0]], "factor": 0.5, "keep": True}),
        Operation("stage", 1, {"part": 0}, vector(2)),
    ]
)
def test_dense(history: list[Operation]) -> None:
    all_parts = [[part, 1.0] for part in range(3)]
    asked = {"parts": all_parts, "ranges": [[0, SIZE]]}
    questions = [Operation(name, step, asked) for name in ("gradient", "squares") for step in range(6)]
    questions += [Operation("values", 0, {"applied": step}) for step in range(6)]
    live(Dense(), history, [*questions, Operation("keys")])


# Rows.

ROWS, DIM = 16, 2


@st.composite
def rows_history(draw: st.DrawFn) -> list[Operation]:
    capacity = draw(st.sampled_from([0, 1, 4, 7]))
    optimizer = {"kind": draw(st.sampled_from(sorted(RULES))), "groups": [{"lr": 0.1}]}
    kind = {"name": "t", "rows": ROWS, "dim": DIM, "dtype": "float32", "seed": 3, "std": 0.5}
    init = Operation("init", draw(st.integers(0, 2)), {**kind, "optimizer": optimizer, "capacity": capacity})
    return [init, *draw(st.lists(rows_operation(init), max_size=24))]


@st.composite
def rows_operation(draw: st.DrawFn, init: Operation) -> Operation:
    step, parts = draw(STEPS), draw(PARTS)
    asked = {"parts": [[part, 1.0] for part in parts]}
    names = ["stage"] * 6 + ["apply"] * 5 + ["drop", "init", "load", "?gradient", "?dump"]
    name = draw(st.sampled_from(names))
    if name == "init":
        return init
    if name == "?dump":
        return Operation(name, 0, {"after": draw(st.sampled_from([-1, 3])), "limit": 3})
    if name.startswith(ASK):
        return Operation(name, step, asked)
    ids = draw(st.lists(st.integers(0, ROWS - 1), max_size=8, unique=True))
    if name == "stage":
        rows = vector(draw(st.integers(0, 9)), len(ids) * DIM).view(-1, DIM)
        return Operation(
            name, step, {"part": draw(st.integers(0, 2))}, pack(torch.tensor(ids, dtype=torch.int64), rows)
        )
    if name == "load":
        return dumped(init, ids, step)
    floor = draw(st.sampled_from([0, 0, step, step + 1]))
    args = {**asked, "floor": floor, "norm": draw(st.sampled_from([None, 1.5]))}
    if name == "apply":
        args["settings"] = draw(st.sampled_from([None, None, [{"lr": 0.5}]]))
        args.update(factor=draw(st.sampled_from([1.0, 0.3])), limit=draw(st.sampled_from([None, 0.2])))
    return Operation(name, step, args)


def dumped(init: Operation, ids: list[int], step: int) -> Operation:
    """A piece of a dump of another shard, in which these rows have had a gradient at this step."""
    other = RowMachine()
    other.apply(Operation("init", 0, {**init.args, "capacity": 0}))
    other.apply(
        Operation(
            "stage", step, {"part": 0}, pack(torch.tensor(ids, dtype=torch.int64), torch.ones(len(ids), DIM))
        )
    )
    other.apply(Operation("apply", step, {"parts": [[0, 1.0]]}))
    answer = other.answer(Operation("dump", 0, {"after": -1, "limit": ROWS}))
    assert answer is not None
    return Operation("load", 0, answer.value, answer.tensor)


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=rows_history())
def test_rows(history: list[Operation]) -> None:
    asked = {"parts": [[part, 1.0] for part in range(3)]}
    questions = [Operation(name, step, asked) for name in ("gradient", "squares") for step in range(6)]
    ids = torch.from_numpy(np.arange(ROWS))
    questions += [Operation("rows", 0, {"applied": step}, ids) for step in range(6)]
    live(RowMachine(), history, [*questions, Operation("dump", 0, {"after": -1, "limit": ROWS})])


# The ledger.

WORKERS = [300, 301, 302, 303]
CLOCKS = [
    [[0, "bsp"]],
    [[0, "ssp(2)"]],
    [[0, "asp"]],
    [[0, "dssp(0, 2)"]],
    [[0, "bsp"], [2, "ssp(1)"]],
    [[0, "ssp(1)"], [2, "bsp"]],
    [[0, "dssp(1, 2)"], [2, "dssp(0, 3)"]],
]


@st.composite
def ledger_operation(draw: st.DrawFn, agreed: Any) -> Operation:
    worker, step = draw(st.sampled_from(WORKERS)), draw(STEPS)
    names = (
        ["claim"] * 6
        + ["done"] * 6
        + ["take", "lost", "join", "begin", "agree", "?tally", "?turn", "?status"]
    )
    name = draw(st.sampled_from(names))
    args: Any = {
        "claim": {"applied": draw(st.sampled_from([None, step])), "join_state": {"step": step}, "stop": 6},
        "done": {"part": draw(st.integers(0, 2)), "total": step / 3, "count": 2.0, "used": f"{1 << step:x}"},
        "lost": {"worker": worker},
        "join": {
            "rank": draw(st.integers(0, 2)),
            "model": draw(st.sampled_from([[["w", [2]]]] * 5 + [[["v", [1]]]])),
        },
        "begin": {"join_state": {"begun": True}},
        "agree": agreed,
        "?turn": {"stop": 6},
    }.get(name)
    return Operation(name, step, args, client=worker)


@st.composite
def ledger_history(draw: st.DrawFn) -> list[Operation]:
    agreed = {"parts": 3, "clocks": draw(st.sampled_from(CLOCKS)), "backup": draw(st.integers(0, 1))}
    model = [["w", [2]]]
    first = [Operation("join", 0, {"rank": rank, "model": model}, client=WORKERS[rank]) for rank in range(3)]
    first += [Operation("agree", 0, agreed), Operation("begin", 0, {"join_state": None})]
    kept = draw(st.lists(st.booleans(), min_size=len(first), max_size=len(first)))
    begun = first if draw(st.integers(0, 3)) else [op for op, keep in zip(first, kept, strict=True) if keep]
    return [*begun, *draw(st.lists(ledger_operation(agreed), max_size=40))]


@settings(max_examples=EXAMPLES, deadline=None)
@given(history=ledger_history())
def test_ledger(history: list[Operation]) -> None:
    questions = [Operation("tally", step, client=who) for step in range(6) for who in WORKERS]
    questions += [Operation("turn", 0, {"stop": 6}, client=who) for who in WORKERS]
    live(Ledger(), history, [*questions, Operation("ready"), Operation("status")])

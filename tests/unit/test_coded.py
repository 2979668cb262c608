"""Coded gradients at a shard: decoded before they are staged, alike on every copy, and refused if they are none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from shoal.compress import TABLE, make_compressor
from shoal.compress.base import Layout
from shoal.config import parse_choice
from shoal.exchange.ps_worker.bucket_shards import cut_shards
from shoal.exchange.ps_worker.push import Encoding
from shoal.server.dense.dense_machine import Dense
from shoal.server.protocol.encoded_gradient import describe_code, turn_of
from shoal.server.protocol.messages import Message, MessageKind
from shoal.server.protocol.optimizer_description import describe
from shoal.server.protocol.state_machine import Operation, Refused
from shoal.server.transport.frames import CODED, decode, encode
from shoal.world.buckets import gaps_of, lay_out

SIZE = 600
PIECES = [[0, 300, 0], [304, 290, 0]]
CODES = ["fp16", "bf16", "int8", "int4", "sign", "topk(0.1)", "randomk(0.3)"]


def machine(code: str, pieces: list[list[int]] = PIECES, size: int = SIZE) -> Dense:
    made = Dense()
    optimizer = describe(optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    args: dict[str, Any] = {"pieces": pieces, "optimizer": optimizer, "aggregate": "weighted", "hold": False}
    made.apply(Operation("init", 0, {**args, "code": code}, torch.zeros(size)))
    return made


def coded(code: str, vector: torch.Tensor, step: int) -> torch.Tensor:
    made = make_compressor(parse_choice(code, "compressor")).code(
        Layout(SIZE, torch.float32, torch.device("cpu"))
    )
    payload = made.payload()
    made.encode(vector, payload, turn_of(step, 0))
    return payload


def gradient(seed: int) -> torch.Tensor:
    vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))
    for start, stop in gaps_of([(start, numel) for start, numel, _ in PIECES], SIZE):
        vector[start:stop] = 0.0
    return vector


@pytest.mark.parametrize("code", CODES)
def test_what_is_staged_is_what_was_said(code: str) -> None:
    made, copy = machine(code), Dense()
    copy.restore(*made.snapshot())
    wanted = torch.zeros(SIZE)
    for part in range(2):
        vector = gradient(part)
        payload = coded(code, vector, 0)
        decoder = make_compressor(parse_choice(code, "compressor")).code(
            Layout(SIZE, torch.float32, torch.device("cpu"))
        )
        decoder.turn_to(turn_of(0, 0))
        decoder.decode(payload, wanted, add=True)
        for one in (made, copy):
            one.apply(Operation("stage", 0, {"part": part, "micro": 0}, payload, codec=CODED))
    wanted[300:304] = wanted[594:] = 0.0
    question = Operation("gradient", 0, {"parts": [[0, 1.0], [1, 1.0]]})
    for one in (made, copy):
        found = one.answer(question)
        assert found is not None
        assert found.tensor is not None
        torch.testing.assert_close(found.tensor, wanted)
    assert torch.equal(made.snapshot()[1], copy.snapshot()[1])


def test_parts_are_rounded_by_lots_of_their_own_and_copies_agree() -> None:
    """Two workers have equal gradients. Rounded alike, their sum would be off by twice as much as one of them."""
    size, steps = 1 << 14, 100
    (shard,) = cut_shards(lay_out([("w", size, torch.float32)], 1, 1 << 20), 1 << 20)
    workers = [Encoding(shard, make_compressor(parse_choice("int4", "compressor"))) for _ in range(2)]
    copies = [machine("int4", [[0, size, 0]], size) for _ in range(2)]
    same = torch.randn(size, generator=torch.Generator().manual_seed(0))
    code = make_compressor(parse_choice("int4", "compressor")).code(
        Layout(size, torch.float32, torch.device("cpu"))
    )
    off, variance, said = torch.zeros(size), 0.0, torch.empty(size)
    for step in range(steps):
        for part, worker in enumerate(workers):
            worker.encode(same.clone(), turn_of(step, 0), part)
            code.decode(worker.payload, said, add=False)
            variance += float((said - same).square().mean()) / steps
            for copy in copies:
                copy.apply(Operation("stage", step, {"part": part}, worker.payload, codec=CODED))
        answers = [
            copy.answer(Operation("gradient", step, {"parts": [[0, 1.0], [1, 1.0]]})) for copy in copies
        ]
        first, second = (answer.tensor for answer in answers if answer is not None)
        assert first is not None
        assert second is not None
        assert torch.equal(first, second)
        off += first - 2 * same
        for copy in copies:
            copy.apply(Operation("drop", step, {"parts": [[0, 1.0], [1, 1.0]], "floor": step + 1}))
    found = float((off / steps).square().mean())
    assert 0.9 < found / (variance / steps) < 1.1, "errors of independent draws add up so"


def test_what_cannot_be_decoded_is_refused() -> None:
    made = machine("topk(0.1)")
    payload = coded("topk(0.1)", gradient(0), 0)
    wild = payload.clone()
    wild[:4].view(torch.int32)[0] = SIZE
    before = made.snapshot()[1]
    for bad in (None, payload[:-1], payload.view(torch.int32), wild):
        with pytest.raises(Refused):
            made.apply(Operation("stage", 0, {"part": 0}, bad, codec=CODED))
    with pytest.raises(Refused, match="not told of a code"):
        machine("").apply(Operation("stage", 0, {"part": 0}, payload, codec=CODED))
    with pytest.raises(Refused, match="one round"):
        machine("powersgd(2)")
    assert torch.equal(made.snapshot()[1], before)


def test_a_frame_says_that_it_is_coded() -> None:
    message = Message(
        MessageKind.CALL, meta=["stage", {}], tensor=torch.zeros(3, dtype=torch.uint8), codec=CODED
    )
    assert decode(encode(message)).codec == CODED
    assert decode(encode(Message(MessageKind.CALL, tensor=torch.zeros(3)))).codec == 0


@pytest.mark.parametrize("name", [name for name in TABLE if not TABLE[name].tried])
def test_a_code_reads_back(name: str) -> None:
    made = make_compressor(parse_choice(name, "compressor"))
    assert make_compressor(parse_choice(describe_code(made), "compressor")) == made


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6), st.integers(0, 9))
def test_pieces_and_gaps_are_everything_once(lengths: list[tuple[int, int]], rest: int) -> None:
    pieces, end = [], 0
    for gap, numel in lengths:
        pieces.append((end + gap, numel))
        end += gap + numel
    covered = [0] * (end + rest)
    for start, stop in [(s, s + n) for s, n in pieces] + gaps_of(pieces, end + rest):
        assert start < stop
        for at in range(start, stop):
            covered[at] += 1
    assert covered == [1] * (end + rest)

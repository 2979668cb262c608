"""Servers of another host: values come as bytes, while the model runs, and nobody sees old ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.exchange.ps import Ps
from shoal.server.client.requests import Client, Request
from shoal.server.processes import Threads, serve
from shoal.server.transport.keys import JobKeys
from shoal.server.transport.shm_transport import new_id
from shoal.testing.parity import ParityTrace, largest_difference, run_toy, take_step, toy_parts
from shoal.testing.spawn import spawn
from shoal.testing.toys import TABLE as TOYS
from shoal.train.passes import forward
from shoal.world.world import World

STEPS = 6


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[str]:
    """Where two servers are that believe to be on another host, as `ps(...)` is told."""
    keys = JobKeys.make()
    keys.write(tmp_path / "keys")
    started, ended = Threads(0, keys), threading.Event()
    threads = [
        threading.Thread(
            target=lambda: serve(started.address, keys, me=new_id("another"), ended=ended.is_set), daemon=True
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    yield f"at={started.address.removeprefix('tcp://')}, keys={tmp_path / 'keys'}"
    started.close()
    ended.set()
    for thread in threads:
        thread.join(5.0)


def train(
    world: World, toy: str, strategy: str, precision: str, deterministic: bool
) -> tuple[ParityTrace, bool]:
    """What it came to, and whether values came while the model ran. Looks at the model between steps."""
    parts = toy_parts(world, TOYS[toy], strategy, precision=precision, deterministic=deterministic)
    exchange = parts.exchange
    assert isinstance(exchange, Ps)
    try:
        losses = []
        for number in range(STEPS):
            losses.append(take_step(parts, number).loss)
            if number == 2:
                taken = {name: value.clone() for name, value in parts.model.state_dict().items()}
                for name, value in exchange.parameters().items():
                    assert torch.equal(taken[name], value), f"{name} was old in state_dict()"
            if number == 3:
                before = {name: p.detach().clone() for name, p in exchange.trained.items()}
                batch = parts.loader.take(0, world.rank).batches[0]
                assert batch is not None
                forward(parts, batch)
                after = exchange.parameters()
                moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
                assert moved, "values came before they were needed"
                assert all(torch.equal(p, after[name]) for name, p in exchange.trained.items())
        return ParityTrace(losses, parts.whole.parameters()), exchange._transfer.ahead
    finally:
        exchange.close()


@pytest.mark.parametrize("toy", ["tied", "chain", "accumulated"])
def test_equals_one_process(elsewhere: str, toy: str) -> None:
    wanted = run_toy(World.alone(), TOYS[toy], "solo", STEPS, accumulate=2 * TOYS[toy].accumulate)
    for found, ahead in spawn(train, 2, toy, f"ps(bucket_mb=0.002, {elsewhere})", "fp64", False):
        gap, where = largest_difference(wanted, found)
        assert gap < 1e-12, f"{gap:.2e} at {where}"
        assert ahead


def test_the_bits_are_those_of_ddp(elsewhere: str) -> None:
    wanted = spawn(run_toy, 2, TOYS["stack"], "ddp(bucket_mb=0.002)", STEPS, None, "fp32", True)[0]
    for found, ahead in spawn(train, 2, "stack", f"ps(bucket_mb=0.002, {elsewhere})", "fp32", True):
        assert found.losses == wanted.losses
        assert all(torch.equal(found.parameters[name], value) for name, value in wanted.parameters.items())
        assert ahead


def test_questions_say_how_much_they_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is on its way on a slow wire must not be asked for again, whether it is values, state or gradients."""
    asked: list[tuple[Request, int]] = []
    ask = Client.ask

    def noted(self: Client, *args: Any, expects: int = 0, **named: Any) -> Request:
        request = ask(self, *args, expects=expects, **named)
        asked.append((request, expects))
        return request

    monkeypatch.setattr(Client, "ask", noted)
    parts = toy_parts(World.alone(), TOYS["odd"], "ps(servers=1)")
    exchange = parts.exchange
    assert isinstance(exchange, Ps)
    try:
        take_step(parts, 0)
        exchange.optimizer_state()
    finally:
        exchange.close()
    large = [
        (request.name, request.answer.tensor.nbytes, expects)
        for request, expects in asked
        if request.answer is not None and request.answer.tensor is not None
    ]
    assert {name for name, _, _ in large} == {"values", "state"}
    assert all(expects >= nbytes for _, nbytes, expects in large), large

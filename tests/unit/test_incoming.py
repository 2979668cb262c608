"""Values that come during the forward pass: each module waits for its own, and nobody uses what is not there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from shoal.exchange.ps_worker.bucket_shards import Shard, cut_shards
from shoal.exchange.ps_worker.first_use import FirstUse
from shoal.exchange.ps_worker.pull import Incoming
from shoal.server.client.requests import Request
from shoal.world.buckets import lay_out


class Net(nn.Module):
    """A tied weight, an attention that uses a projection without calling it, a layer that does not run at first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.seldom = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.early = False
        self.often = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.last.weight.sum() if self.early else 1.0
        y = self.embed(x)
        y = self.attend(y, y, y)[0]
        if self.often:
            y = self.seldom(y)
        return F.linear(self.last(y), self.embed.weight) * scale


def served(model: nn.Module) -> tuple[Incoming, list[str], Callable[[], None]]:
    """One shard a parameter; what arrived so far; and what asks for all of them."""
    trained = dict(model.named_parameters())
    sizes = [(name, p.numel(), p.dtype) for name, p in reversed(trained.items())]
    shards = cut_shards(lay_out(sizes, slices=1, capacity=1), 2**20)
    arrived: list[str] = []

    def receive(shard: Shard, request: Request, args: Any) -> None:
        del request, args
        arrived.extend(piece.name for piece in shard.pieces)

    incoming = Incoming(model, trained, shards, receive)

    def ask() -> None:
        arrived.clear()
        nothing: Any = None
        incoming.expect(dict.fromkeys((s.number for s in shards), nothing), {}, later=True)

    return incoming, arrived, ask


def noting(module: nn.Module, arrived: list[str], seen: dict[str, set[str]], name: str) -> None:
    module.register_forward_hook(lambda *_: seen.setdefault(name, set(arrived)) and None)


def test_each_module_waits_for_its_own() -> None:
    model = Net()
    incoming, arrived, ask = served(model)
    ask()
    assert set(arrived) == set(dict(model.named_parameters())), "before the first pass, everything at once"
    model(torch.arange(3)[None])
    assert incoming.guarded
    seen: dict[str, set[str]] = {}
    for name in ("embed", "attend", "last"):
        noting(model.get_submodule(name), arrived, seen, name)
    ask()
    assert not arrived
    model(torch.arange(3)[None]).sum().backward()
    unused = {"seldom.weight", "seldom.bias"}
    attention = {n for n in dict(model.named_parameters()) if n.startswith("attend")}
    assert seen["embed"] == unused | {"embed.weight"}
    assert seen["attend"] == unused | attention | {"embed.weight"}
    assert seen["last"] == set(dict(model.named_parameters()))
    assert next(n for s in incoming.order for p in s.pieces if (n := p.name) not in unused) == "embed.weight"
    assert not incoming.complete()


def test_what_runs_for_the_first_time_is_there() -> None:
    model = Net()
    _, arrived, ask = served(model)
    ask()
    model(torch.arange(3)[None])
    model.often = True
    ask()
    model(torch.arange(3)[None])
    assert set(arrived) == set(dict(model.named_parameters()))


def test_use_before_the_call_of_its_module_is_seen() -> None:
    model = Net()
    model.early = True
    watch = FirstUse(model, {p: n for n, p in model.named_parameters()})
    watch.__enter__()
    model(torch.arange(3)[None])
    watch.stop()
    guards = watch.guards()
    assert "last.weight" in guards[""]
    assert guards["last"] == ["last.bias"]


def test_use_before_it_has_come_is_an_error_and_not_a_wrong_number() -> None:
    model = Net()
    _, _, ask = served(model)
    ask()
    model(torch.arange(3)[None])

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, model.last.weight)  # of a module that is called later

    model.seldom, model.often = Odd(), True
    model.embed.register_forward_hook(lambda _, __, y: F.linear(y, model.last.weight))
    ask()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.arange(3)[None]).sum().backward()


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    model = Net()
    incoming, arrived, ask = served(model)
    ask()
    with pytest.raises(IndexError):
        model(torch.tensor([[99]]))
    assert not torch.overrides._get_current_function_mode_stack()
    ask()
    model(torch.arange(3)[None])
    assert set(arrived) == set(dict(model.named_parameters()))
    assert not incoming.complete()


def test_compiled_models_wait_at_once() -> None:
    model = Net()
    model.last._compiled_call_impl = lambda *_: None  # type: ignore[assignment]
    incoming, arrived, ask = served(model)
    ask()
    assert len(arrived) == len(dict(model.named_parameters()))
    assert incoming._watch is None

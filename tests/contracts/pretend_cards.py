"""Cards where there are none: torch's `meta` device stands for them, and a mode records what crosses to the host.

A tensor on `meta` has a size, a type and no values, and meets a tensor of the host only by an error: whatever Shoal
makes in the wrong place shows. What needs values (`.item()`, a copy to the host) is recorded with the line of Shoal
that asked, and gets ones. Collectives of tensors on cards go through torch's fake group, those of the host through a
real gloo group.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the fake backend)
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from shoal.exchange.reduce.comm_thread import CommTask
from shoal.world import devices
from shoal.world import world as world_module
from shoal.world.world import World

SOURCE = str(Path(world_module.__file__).parents[1]) + "/"
FETCH = devices.__file__
"""Fetches for others: who asked is the line to name."""
CARD = torch.device("meta")
BACKENDS = "cpu:gloo,meta:fake"
"""As `cpu:gloo,cuda:nccl` on real cards."""


def line_of(limit: str = "") -> str:
    """The nearest function of Shoal's own, as `folder/file.py function`; with `limit`, only if it is the caller."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE) and name != FETCH and not frame.f_code.co_name.startswith("<"):
            return f"{name.removeprefix(SOURCE)} {frame.f_code.co_name}"
        if limit and "/torch/" not in name and name != __file__:
            return ""
        frame = frame.f_back
    return ""


@dataclass
class Seen:
    """What was recorded."""

    unnamed: Counter[str] = field(default_factory=Counter)
    """Tensors that Shoal's own frames made without naming a device."""
    waits: Counter[str] = field(default_factory=Counter)
    """Where the host waited for values of a card."""
    moves: Counter[str] = field(default_factory=Counter)
    """Copies from the host to a card."""
    collectives: Counter[str] = field(default_factory=Counter)
    """Collectives of tensors on cards."""


class Unnamed(TorchFunctionMode):
    """Records tensors made without a device."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _device_constructors() and kwargs.get("device") is None:
            place = line_of(limit="caller")
            if place and not place.startswith("testing/"):
                self.seen.unnamed[f"{place}: {func.__name__}"] += 1
        return func(*args, **kwargs)


class Cards(TorchDispatchMode):
    """Records what crosses between host and card, and answers for the card."""

    def __init__(self, seen: Seen, fake: dist.ProcessGroup) -> None:
        super().__init__()
        self.seen = seen
        self.fake = fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        on_card = [t for t in tensors if t.is_meta]
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and on_card:
            assert len(on_card) == len(tensors), f"{line_of()}: a collective of tensors in two places"
            self.seen.collectives[f"{line_of()}: {name}"] += 1
            return self._collective(func, args, kwargs)
        if name == "_local_scalar_dense" and on_card:
            self.seen.waits[line_of()] += 1
            kind = tensors[0].dtype
            return 1.0 if kind.is_floating_point else bool(1) if kind is torch.bool else 1
        if name in ("nonzero", "masked_select", "unique_dim", "_unique2") and on_card:
            raise AssertionError(f"{line_of()}: the size of {name} is known to the card only")
        if name in ("_to_copy", "copy_"):
            device = kwargs.get("device")
            places = {t.device.type for t in tensors} | (
                {torch.device(device).type} if device is not None else set()
            )
            if len(places) > 1:
                to = tensors[0].device if name == "copy_" else torch.device(device)
                if to.type == "cpu":
                    self.seen.waits[line_of()] += 1
                    return tensors[0] if name == "copy_" else _ones(tensors[0], kwargs)
                self.seen.moves[line_of()] += 1
        if name.startswith("_fused_") and on_card:
            return None  # they have no kernel for `meta`, and return nothing
        return func(*args, **kwargs)

    def _collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        def instead(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return torch.zeros(value.shape, dtype=value.dtype, device="cpu")
            if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
                return self.fake.boxed()  # type: ignore[attr-defined]
            return value

        found = tree_map(instead, (args, kwargs), is_leaf=lambda value: isinstance(value, torch.ScriptObject))
        return func(*found[0], **found[1])


def _ones(like: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
    return torch.ones(like.shape, dtype=kwargs.get("dtype") or like.dtype, device="cpu")


def as_on_cards(world: World) -> World:
    """The same workers, each with a card: torch's default group is made anew for both kinds of memory."""
    store = world.store
    assert store is not None
    dist.destroy_process_group()
    both = dist.PrefixStore("cards", store)
    dist.init_process_group(BACKENDS, store=both, rank=world.rank, world_size=world.size)
    world.group = dist.group.WORLD
    return World(world.rank, world.size, CARD, world.hosts, store, dist.group.WORLD)


@contextmanager
def pretended(seen: Seen) -> Iterator[None]:
    """While it lasts, `meta` is a card, on the communication thread too."""
    fake = dist.new_group(backend="fake")
    optimizer: Any = import_module("torch.optim.optimizer")  # whose name torch.optim hides
    supported = optimizer._get_fused_kernels_supported_devices
    run = CommTask.run

    def within(task: CommTask, stream: Any) -> None:
        with Unnamed(seen), Cards(seen, fake):
            run(task, stream)

    changes: list[tuple[Any, str, Callable[..., Any]]] = [
        (optimizer, "_get_fused_kernels_supported_devices", lambda: [*supported(), CARD.type]),
        (CommTask, "run", within),
        (world_module, "small_backend", lambda device: BACKENDS if device == CARD else "gloo"),
    ]
    with ExitStack() as entered:
        for where, name, instead in changes:
            entered.enter_context(mock.patch.object(where, name, instead))
        entered.enter_context(Unnamed(seen))
        entered.enter_context(Cards(seen, fake))
        yield

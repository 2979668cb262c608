"""Tests written for cards, on CPUs: whatever is moved to a card stays where it is.

Half of torch's `DistributedTest` asks for cards only to have somewhere to put a model; what it tests, DDP and its
hooks, does not depend on them. Such tests are marked when torch's module is imported, and run with a mode under which
every card is the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.testing._internal import common_distributed

_Test = TypeVar("_Test", bound=Callable[..., Any])
_CPU = torch.device("cpu")
_MARK = "asks_for_cards"


def lift_skips() -> None:
    """Before torch's module is imported: its tests run with as few cards and ranks as there are."""

    def mark(test: _Test) -> _Test:
        setattr(test, _MARK, True)
        return test

    common_distributed.skip_if_no_gpu = mark
    common_distributed.skip_if_lt_x_gpu = lambda _count, **_: mark
    common_distributed.skip_if_small_worldsize = lambda test: test


def asks_for_cards(test: Callable[..., Any]) -> bool:
    """Whether a test of torch's would have been skipped without cards."""
    return hasattr(test, _MARK)


def enter(cards: int) -> None:
    """From here on this process has so many cards, each of which is the CPU."""
    torch.cuda.device_count = lambda: cards
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = lambda *_, **__: None
    torch.cuda.synchronize = lambda *_, **__: None
    init = DistributedDataParallel.__init__

    def on_cpu(self: Any, *args: Any, **options: Any) -> None:
        for device in ("device_ids", "output_device"):  # the second and third argument
            options.pop(device, None)
        init(self, *args[:1], **options)

    DistributedDataParallel.__init__ = on_cpu
    to = torch.nn.Module.to

    def stay(self: Any, *args: Any, **named: Any) -> Any:
        return to(self, *[_CPU if isinstance(value, int) else value for value in args], **named)

    torch.nn.Module.to = stay
    _EveryCardIsTheCpu().__enter__()


class _EveryCardIsTheCpu(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        named = {name: _here(value) for name, value in (kwargs or {}).items()}
        if isinstance(named.get("device"), int):
            named["device"] = _CPU
        placed = [_here(value) for value in args]
        if func is torch.Tensor.to and len(placed) > 1 and isinstance(placed[1], int):
            placed[1] = _CPU
        return func(*placed, **named)


def _here(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return _CPU if isinstance(value, str) and value.startswith("cuda") else value

"""One exchange for each model that learns, seen as one by everything around a step: checkpoints, evaluation, the loop.

A model without an optimizer has no exchange: every worker holds it whole, for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn, optim

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile
from shoal.exchange.contract import Exchange, JoinState, LocalShard, State, StepView, Tally
from shoal.train.own_step.models import Models
from shoal.types import Promise
from shoal.world.mesh import Mesh
from shoal.world.world import World

T = TypeVar("T")


class ExchangeByModel(Exchange):
    """All exchanges of a run with a step of its own. A step calls each by itself; see `OwnStep`."""

    promise = Promise.EXACT
    summary = "one exchange for each model"

    def __init__(self, models: Models, exchanges: Mapping[str, Exchange]) -> None:
        self.module: nn.Module = models
        self.models = models
        self.by_model = dict(exchanges)
        self.optimizer: optim.Optimizer = OptimizerByModel({n: e.optimizer for n, e in exchanges.items()})

    @property
    def optimizer_kind(self) -> str:
        return ", ".join(f"{name}: {e.optimizer_kind}" for name, e in sorted(self.by_model.items()))

    def begin(self, view: StepView) -> None:
        for exchange in self.by_model.values():
            exchange.begin(view)

    def discard(self) -> None:
        for exchange in self.by_model.values():
            exchange.discard()

    # A step of the user's own does these for one model at a time.

    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        raise NotImplementedError

    def collect(self) -> None:
        raise NotImplementedError

    def finish(self, tally: Tally) -> Tally:
        raise NotImplementedError

    def add_gradients(self, gradients: Mapping[str, torch.Tensor], weight: float) -> None:
        raise NotImplementedError

    def grad_norm(self) -> float:
        raise NotImplementedError

    def apply(self, factor: float, clamp: float | None) -> None:
        raise NotImplementedError

    def publish(self) -> None:
        raise NotImplementedError

    def abort(self) -> None:
        for exchange in self.by_model.values():
            exchange.abort()

    def reopen(self, world: World, model_world: World) -> None:
        for exchange in self.by_model.values():
            exchange.reopen(world, model_world)

    def start(self, step: int, state: JoinState | None) -> None:
        for exchange in self.by_model.values():
            exchange.start(step, state)

    def close(self) -> None:
        for exchange in self.by_model.values():
            exchange.close()

    # State, by the names that the models' parameters have together

    def parameters(self) -> dict[str, torch.Tensor]:
        plain = torch.contiguous_format
        held = {name: p.detach().clone(memory_format=plain) for name, p in self.models.named_parameters()}
        return held | self._joined(lambda exchange: exchange.parameters())

    def gradients(self) -> dict[str, torch.Tensor]:
        return self._joined(lambda exchange: exchange.gradients())

    def optimizer_state(self) -> State:
        return self._joined(lambda exchange: exchange.optimizer_state())

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, exchange in self.by_model.items():
            exchange.load_optimizer_state(_of_model(name, state))

    @property
    def order(self) -> Sequence[str]:  # type: ignore[override]
        return [f"{name}.{one}" for name, exchange in self.by_model.items() for one in exchange.order]

    def lay_out_again(self, order: list[str]) -> None:
        for name, exchange in self.by_model.items():
            exchange.lay_out_again(list(_of_model(name, dict.fromkeys(order))))

    def parameter_shards(self) -> list[LocalShard]:
        held = [
            LocalShard(f"{name}.{one}", 0, p.detach())
            for name, model in self.models.items()
            if name not in self.by_model
            for one, p in model.named_parameters()
        ]
        return [*held, *self._shards(lambda exchange: exchange.parameter_shards())]

    def optimizer_shards(self) -> list[LocalShard]:
        return self._shards(lambda exchange: exchange.optimizer_shards())

    def gradient_shards(self) -> list[LocalShard]:
        return self._shards(lambda exchange: exchange.gradient_shards())

    def _joined(self, ask: Callable[[Exchange], Mapping[str, T]]) -> dict[str, T]:
        return {
            f"{name}.{one}": value
            for name, exchange in self.by_model.items()
            for one, value in ask(exchange).items()
        }

    def _shards(self, ask: Callable[[Exchange], list[LocalShard]]) -> list[LocalShard]:
        return [
            LocalShard(f"{name}.{held.name}", held.start, held.tensor)
            for name, exchange in self.by_model.items()
            for held in ask(exchange)
        ]

    @classmethod
    def cost(
        cls, options: object, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        raise NotImplementedError


class OptimizerByModel(optim.Optimizer):
    """The groups and the state of several optimizers: what a learning rate schedule and a checkpoint act on."""

    def __init__(self, optimizers: Mapping[str, optim.Optimizer]) -> None:
        super().__init__([group for one in optimizers.values() for group in one.param_groups], {})
        self.state: Any = _StateByModel(list(optimizers.values()))

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Nothing: every optimizer has its own updates. Schedules want to see a call."""
        del closure


class _StateByModel(MutableMapping[torch.Tensor, object]):
    """The state of a tensor is where the optimizer that updates it looks for it."""

    def __init__(self, optimizers: Sequence[optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _of(self, tensor: torch.Tensor) -> Any:
        for optimizer in self._optimizers:
            if any(tensor is one for group in optimizer.param_groups for one in group["params"]):
                return optimizer.state
        raise KeyError("no optimizer updates this tensor")

    def __getitem__(self, tensor: torch.Tensor) -> Any:
        for optimizer in self._optimizers:
            if tensor in optimizer.state:
                return optimizer.state[tensor]
        raise KeyError("no optimizer has a state for this tensor")

    def __setitem__(self, tensor: torch.Tensor, state: object) -> None:
        self._of(tensor)[tensor] = state

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._of(tensor)[tensor]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (tensor for optimizer in self._optimizers for tensor in optimizer.state)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)


def _of_model(name: str, entries: Mapping[str, T]) -> dict[str, T]:
    """What belongs to one model, by the names within it."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): value for key, value in entries.items() if key.startswith(prefix)}

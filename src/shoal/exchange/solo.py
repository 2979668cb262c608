"""One process, nothing to exchange: the reference that every other exchange is held to.

When to use: one worker, or to see what the others must compute.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.exchange.base import (
    Exchange,
    Held,
    State,
    Tally,
    back_propagate,
    detached,
    trainable,
)
from shoal.exchange.norms import sum_of_squares
from shoal.exchange.rowlines import Beside
from shoal.exchange.setup import NoOptions, Setup
from shoal.exchange.tables import Tables
from shoal.optimizer import ELEMENTWISE, make_optimizer, move_optimizer, names_in_groups, step_scaled
from shoal.server.description import settings_of
from shoal.types import Memory, Promise


class Solo(Exchange):
    """Plain torch: gradients where autograd puts them, the optimizer on the parameters themselves."""

    promise = Promise.EXACT
    summary = "one process alone"
    Options = NoOptions
    keeps_rows = True

    def __init__(self, setup: Setup, options: NoOptions) -> None:
        del options
        self.module = setup.model
        self._parameters = trainable(setup.model)
        made = make_optimizer(setup.make_optimizer, self._parameters)
        groups = names_in_groups(made, self._parameters, setup.model)
        # Their kernels take dense gradients; an optimizer such as SparseAdam takes sparse ones as they are.
        sparse = any(getattr(module, "sparse", False) for module in setup.model.modules())
        self._densify = sparse and type(made) in ELEMENTWISE
        self.optimizer = move_optimizer(made, groups, {name: [p] for name, p in self._parameters.items()})
        self.tables: Tables = Tables(setup.model, made, setup.seed, shards=1, first=0)
        self.tables.connect(Beside(self.tables.shards))
        self.tables.begin(0)
        self._step = 0

    order: tuple[str, ...] = ()

    def first_part(self, step: int, own: int) -> int:
        self._step = step
        return own

    def begin(self) -> None:
        pass

    def lay_out_again(self, order: list[str]) -> None:
        del order  # nothing is laid out: every tensor is where torch put it

    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        del last
        back_propagate(loss, weight)
        self.tables.take(counts=weight != 0.0)

    def collect(self) -> None:
        pass  # gradients stay where autograd puts them

    def finish(self, tally: Tally) -> Tally:
        if self._densify:
            for p in self._parameters.values():
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
        self.tables.stage((self._step, 0))
        return tally

    def norm(self) -> float:
        return float((sum_of_squares(self._held()) + self.tables.own_squares()) ** 0.5)

    def update(self, factor: float, limit: float | None) -> None:
        if self.tables:
            args = {"factor": factor, "limit": limit, "settings": settings_of(self.optimizer)}
            self.tables.send("apply", self._step, {**args, **self._named_part()})
        step_scaled(self.optimizer, self._held, factor, limit)
        self._forget()

    def drop(self) -> None:
        self.tables.send("drop", self._step, self._named_part())
        self._forget()

    def _named_part(self) -> dict[str, object]:
        """A step has one part here, and with it all steps before the next are over."""
        return {"parts": [[0, 1]], "floor": self._step + 1}

    def _forget(self) -> None:
        for p in self._parameters.values():
            p.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self._parameters.items() if p.grad is not None}

    def targets(self) -> list[Held]:
        return [Held(name, 0, p) for name, p in self._parameters.items()]

    def optimizer_state(self) -> State:
        state = self.optimizer.state
        return {name: detached(state[p]) for name, p in self._parameters.items() if p in state}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, entries in state.items():
            self.optimizer.state[self._parameters[name]] = detached(entries)

    @classmethod
    def memory(
        cls, parameters: float, workers: int, state_per_parameter: int = 2, itemsize: int = 4
    ) -> Memory:
        del workers
        each = parameters * itemsize
        return Memory(each, each, each * state_per_parameter)

    def _held(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]

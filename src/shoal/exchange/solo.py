"""One process, nothing to exchange: the reference that every other exchange is held to.

When to use: one worker, or to see what the others must compute.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile
from shoal.exchange.buckets.bucket_cost import (
    held_cost,
    whole_state,
)
from shoal.exchange.buckets.norms import sum_of_squares
from shoal.exchange.contract import (
    Exchange,
    LocalShard,
    State,
    StepView,
    Tally,
    back_propagate,
    back_propagate_into,
    detached,
    trainable,
)
from shoal.exchange.embeddings.back_ends import InProcess
from shoal.exchange.embeddings.embedding_tables import Tables
from shoal.exchange.setup import NoOptions, Setup
from shoal.optimizer import ELEMENTWISE, make_optimizer, move_optimizer, names_in_groups, step_scaled
from shoal.server.protocol.dense_messages import NamedParts, UpdateArguments
from shoal.server.protocol.optimizer_description import settings_of
from shoal.types import Promise
from shoal.world.mesh import Mesh
from shoal.world.world import World


class Solo(Exchange):
    """Plain torch: gradients where autograd puts them, the optimizer on the parameters themselves."""

    promise = Promise.EXACT
    takes_own_step = True
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
        self.tables.connect(InProcess(self.tables.shards))
        self.tables.begin(0)
        self._step = 0

    order: tuple[str, ...] = ()

    def begin(self, view: StepView) -> None:
        self._step = view.step
        self._forget()  # what other backward passes have left at the parameters between two steps

    def lay_out_again(self, order: list[str]) -> None:
        del order  # nothing is laid out: every tensor is where torch put it

    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        del last
        back_propagate(loss, weight)
        self.tables.take(counts=weight != 0.0)

    def add_term(self, loss: torch.Tensor | None, weight: float, retain_graph: bool) -> None:
        back_propagate_into(self._parameters.values(), loss, weight, retain_graph)

    def collect(self) -> None:
        pass  # gradients stay where autograd puts them

    def finish(self, tally: Tally) -> Tally:
        if self._densify:
            for p in self._parameters.values():
                if p.grad is not None and p.grad.is_sparse:
                    p.grad = p.grad.to_dense()
        self.tables.stage((self._step, 0))
        return tally

    def add_gradients(self, gradients: Mapping[str, torch.Tensor], weight: float) -> None:
        for name, gradient in gradients.items():
            p = self._parameters[name]
            p.grad = gradient * weight if p.grad is None else p.grad + gradient * weight

    def grad_norm(self) -> float:
        return float((sum_of_squares(self._held()) + self.tables.own_squares()) ** 0.5)

    def apply(self, factor: float, clamp: float | None) -> None:
        if self.tables:
            settings = settings_of(self.optimizer)
            args: UpdateArguments = {
                "parts": [[0, 1]],
                "floor": self._step + 1,
                "factor": factor,
                "limit": clamp,
                "settings": settings,
            }
            self.tables.send("apply", self._step, args)
        step_scaled(self.optimizer, self._held, factor, clamp)
        self._forget()

    def publish(self) -> None:
        pass  # nobody else has a copy

    def discard(self) -> None:
        self.tables.send("drop", self._step, self._named_part())
        self._forget()

    def abort(self) -> None:
        self.discard()  # nobody else is there to be lost

    def reopen(self, world: World, model_world: World) -> None:
        del world, model_world

    def _named_part(self) -> NamedParts:
        """A step has one part here, and with it all steps before the next are over."""
        return {"parts": [[0, 1]], "floor": self._step + 1}

    def _forget(self) -> None:
        for p in self._parameters.values():
            p.grad = None

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: p.grad.clone() for name, p in self._parameters.items() if p.grad is not None}

    def gradient_shards(self) -> list[LocalShard]:
        return [LocalShard(name, 0, p.grad) for name, p in self._parameters.items() if p.grad is not None]

    def optimizer_shards(self) -> list[LocalShard]:
        return [LocalShard(name, 0, p) for name, p in self._parameters.items()]

    def optimizer_state(self) -> State:
        state = self.optimizer.state
        return {name: detached(state[p]) for name, p in self._parameters.items() if p in state}

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        for name, entries in state.items():
            self.optimizer.state[self._parameters[name]] = detached(entries)

    @classmethod
    def cost(
        cls, options: NoOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        del options, mesh, compressor
        learning = sum(p.nbytes for p in profile.trained)
        return held_cost(profile, learning, learning, whole_state(profile))

    def _held(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters.values() if p.grad is not None]

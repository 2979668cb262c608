"""ZeRO stage 3: parameters, gradients and optimizer state are cut over the workers; each holds its rows only.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", VLDB 2023.
When to use: the model does not fit into one worker. Parameters are gathered unit by unit when they are needed, in
forward and again in backward, which is one and a half times the traffic of ddp.

torch's FSDP2 (`fully_shard`) does the cutting; docs/concepts/zero3.md says what is different from using it by hand.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from shoal.compress.base import Compressor
from shoal.cost import Cost, ModelProfile, ParameterProfile
from shoal.errors import ConfigError
from shoal.exchange.buckets.bucket_cost import agreement_cost
from shoal.exchange.buckets.norms import root_of_sum, squares_of
from shoal.exchange.buckets.users_optimizer import users_optimizer
from shoal.exchange.contract import (
    Exchange,
    LocalShard,
    State,
    StepView,
    Tally,
    back_propagate,
    check_members,
    check_not_torn,
    trainable,
)
from shoal.exchange.fsdp.all_gather import Gathers
from shoal.exchange.fsdp.reduce_scatter import Scatters
from shoal.exchange.fsdp.row_shards import RowShards, watch
from shoal.exchange.fsdp.unit_cost import (
    cut_and_whole,
    gathered_at_once,
    padded_bytes,
    replica_traffic,
    rows_held,
    unit_sizes,
    unit_traffic,
)
from shoal.exchange.fsdp.units import Unit, UnitOptions, axes_of, can_be_cut, cut_into_units, make_real
from shoal.exchange.local_tensor import local, local_gradient
from shoal.exchange.setup import Setup
from shoal.optimizer import move_optimizer, step_scaled
from shoal.types import Promise
from shoal.world.mesh import Mesh
from shoal.world.traffic import ring_bytes
from shoal.world.world import World


class Zero3(Exchange):
    """Parameters are gathered when they are needed; gradients are reduce-scattered as soon as they are there."""

    promise = Promise.EXACT
    summary = "parameters, gradients and optimizer state cut over the workers"
    Options = UnitOptions
    every_worker_computes = True
    cuts_parameters = True
    order: tuple[str, ...] = ()

    def __init__(self, setup: Setup, options: UnitOptions) -> None:
        root = setup.root or setup.model
        self.module = setup.model
        self.world = setup.world
        self._model_world = setup.model_world
        self._shares = setup.shares
        self._owners, self._replicas = axes_of(setup)
        self._gather_world = self._owners
        """The group for all-gathers. Parameters are cut over `_owners`; workers of `_replicas` hold the same rows."""
        # A pipeline runs forward for many micro-batches before the first backward: there, units stay gathered.
        reshard = options.reshard and setup.root is None
        self._units: list[Unit] = []
        if self._owners.size > 1:
            self._units = cut_into_units(root, setup, replace(options, reshard=reshard))
        if setup.values is not None:
            make_real(root, torch.device("cpu") if options.offload else setup.world.device)
        self._rows = RowShards(self._units, setup.model, self._owners, setup.shares)
        if setup.values is not None:
            self._rows.fill(setup.model, setup.values)
        self._prepare_optimizer(setup)
        self._used: dict[str, bool] = {}
        self._gradients: dict[str, torch.Tensor] = {}
        """The gradient of this worker's rows, by parameter."""
        self._added: list[str] = []
        """Parameters in `_gradients` whose gradient came through `add_gradients` alone."""
        self._counting = True
        """False while a micro-batch is computed that holds no samples."""
        self._gathers: Gathers | None = None
        self._scatters: Scatters | None = None
        # Memory in which a sum will be is of no use to a pipeline, nor to a copy from a card.
        self._at_once = setup.root is not None or (options.offload and setup.world.device.type != "cpu")
        if self._units:
            self._open_line(reshard)
        for name, p in self._rows.whole.items():
            if p.requires_grad:
                watch(p, self._noticing(name))

    def _prepare_optimizer(self, setup: Setup) -> None:
        self._learning = trainable(setup.model)
        made, groups = users_optimizer(setup, self._learning, "zero3", slices=True)
        self._targets = {name: self._rows.of(name) for name in self._learning}
        # A worker that has no row of a parameter has nothing to update of it.
        tensors = {name: [t] if t.numel() else [] for name, t in self._targets.items()}
        self.optimizer = move_optimizer(made, groups, tensors)

    def _open_line(self, reshard: bool) -> None:
        # Two groups, because workers may come to a gather and to a sum in different orders.
        self._gather_world = self._owners.new_group()
        self._gathers = Gathers(self._units, self._gather_world, reshard)
        self._scatters = Scatters(self._units, self._gathers, self._owners, self._at_once)
        self._agreed = False
        self._watching = False
        root = self._units[-1].module
        assert isinstance(root, nn.Module)
        # FSDP2 makes the gathered parameters during the first forward pass; before that there is nothing to hook.
        root.register_forward_hook(self._watch_gathered)
        for name, part in self._rows.parts.items():
            if name in self._learning and not self._at_once:
                watch(part.parameter, self._keeping(name))

    # Which parameters had a gradient, and where it is

    def _watch_gathered(self, module: object, inputs: object, output: object) -> None:
        """Watch the gathered parameters, which exist from the end of the first forward pass on."""
        del module, inputs, output
        if not self._watching:
            self._watching = True
            for name, part in self._rows.parts.items():
                if name in self._learning:
                    watch(part.gathered, self._noticing(name))

    # Hooks live as long as their tensors, where no garbage collector sees them: they must not keep us alive.

    def _noticing(self, name: str) -> Callable[[torch.Tensor], None]:
        watcher = weakref.ref(self)

        def hook(tensor: torch.Tensor) -> None:
            owner = watcher()
            if owner is not None and owner._counting:
                # FSDP2 reduces zeros for a parameter without a gradient; only this hook tells "no gradient anywhere"
                # (the optimizer leaves it alone) from "a gradient of zero" (momentum and weight decay go on).
                owner._used[name] = True
            if tensor.grad is not None and tensor.grad.is_sparse:
                tensor.grad = tensor.grad.to_dense()

        return hook

    def _keeping(self, name: str) -> Callable[[torch.Tensor], None]:
        watcher = weakref.ref(self)

        def hook(parameter: torch.Tensor) -> None:
            # Memory in which the sum will be. Taken away, or FSDP2 would add the next one to it too early.
            owner = watcher()
            if owner is None:
                return
            assert parameter.grad is not None
            owner._gradients.setdefault(name, local(parameter.grad))
            parameter.grad = None

        return hook

    # The contract

    def lay_out_again(self, order: list[str]) -> None:
        del order  # nothing is laid out: each parameter is cut by its own rows

    def begin(self, view: StepView) -> None:
        del view
        if self._gathers is not None and not self._agreed and self._watching:
            # Collective, so at a step boundary, where all ranks come in the same order, and once.
            self._gathers.take_order(self.world.gather_values(self._gathers.seen))
            self._agreed = True
        for unit in self._units:
            unit.reshard()  # an evaluation leaves the root gathered
        self.discard()

    def backward(self, loss: torch.Tensor | None, weight: float, last: bool) -> None:
        del last
        # A filler (a worker without samples) takes part in all collectives, and nothing it touches counts as used.
        self._counting = weight != 0.0
        back_propagate(loss, weight)
        self._counting = True
        if self._gathers is not None and self._scatters is not None:
            # Before `settle`: another worker may wait for a gather of ours before it can send the gradients we wait
            # for.
            self._gathers.close_backward()
            self._scatters.settle()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        try:
            yield
        finally:
            for unit in self._units:  # an evaluation has no backward pass, which would leave rows
                unit.reshard()

    def before_reduce(self) -> None:
        # Backward passes in two parts go past all hooks; but now, those that have a gradient have it still.
        for name in self._learning:
            self._used[name] = self._used.get(name, False) or self._rows.has_gradient(name)
        self._agree(Tally(0.0, 0.0))

    def get_grad(self, name: str) -> torch.Tensor | None:
        return (
            super().get_grad(name) if self._used.get(name) else None
        )  # FSDP2 leaves zeros where there is none

    def set_grad(self, name: str, gradient: torch.Tensor | None) -> None:
        super().set_grad(name, gradient)
        self._used[name] = gradient is not None

    def collect(self) -> None:
        pass  # the runtime of a pipeline has had them summed already

    def _agree(self, tally: Tally) -> Tally:
        """On the loss, and on which parameters had a gradient anywhere."""
        used = [float(self._used.get(name, False)) for name in self._learning]
        # One collective for the loss and for who had a gradient. In float64, where counts stay exact up to 2^53.
        numbers = torch.tensor([tally.total, tally.count, *used], dtype=torch.float64, device="cpu")
        self.world.all_reduce(numbers).wait()
        total, count, *users = numbers.tolist()
        self._used = {name: n > 0 for name, n in zip(self._learning, users, strict=True)}
        return Tally(total, count)

    def finish(self, tally: Tally) -> Tally:
        agreed = self._agree(tally)
        handles = []
        for name, p in self._rows.whole.items():
            if self._used.get(name):
                gradient = local_gradient(p)
                self._gradients[name] = torch.zeros_like(local(p)) if gradient is None else gradient
                # What FSDP2 could not cut is replicated as under ddp. `_used` is agreed on by now, so all ranks start
                # the same collectives.
                handles.append(self.world.all_reduce(self._gradients[name]))
        if self._at_once:
            self._take_gradients()
        # After the sum over the owners: between replicas only rows travel, and once a step.
        handles += [self._replicas.all_reduce(rows) for rows in self._sums()]
        for handle in handles:
            handle.wait()
        return agreed

    def _take_gradients(self) -> None:
        """Take the gradients from where FSDP2 has put them."""
        for name in self._having():
            if name in self._rows.parts:
                gradient = self._rows.parts[name].parameter.grad
                held = self._rows.parts[name].held
                self._gradients[name] = torch.zeros_like(held) if gradient is None else local(gradient)

    def add_gradients(self, gradients: Mapping[str, torch.Tensor], weight: float) -> None:
        for name, gradient in gradients.items():
            mine = self._rows.mine(name, gradient)
            if self._used.get(name) or name in self._gradients:
                self._gradients[name].add_(mine, alpha=weight)
            else:  # in no sum of a unit
                self._gradients[name] = mine * weight
                self._added.append(name)
            self._used[name] = True

    def withhold(self, names: Collection[str]) -> None:
        for name in names:
            self._used[name] = False
            self._gradients.pop(name, None)

    def grad_norm(self) -> float:
        # What is not cut is the same on every owner: one of them counts it.
        mine = [name for name in self._having() if name in self._rows.parts or self._owners.rank == 0]
        squares = squares_of([self._gradients[name] for name in mine])
        whole = sum(self._shares.get(name, 1.0) * each for name, each in zip(mine, squares, strict=True))
        return root_of_sum(whole, self._owners, self._model_world)

    def apply(self, factor: float, clamp: float | None) -> None:
        for name in self._having():
            self._targets[name].grad = self._gradients[name]  # others keep None, which optimizers pass over
        step_scaled(self.optimizer, self._held, factor, clamp)
        self.discard()

    def publish(self) -> None:
        pass  # others gather the new values when they need them

    def discard(self) -> None:
        for target in self._targets.values():
            target.grad = None
        for p in self._rows.whole.values():
            p.grad = None
        for part in self._rows.parts.values():
            part.parameter.grad = None
        if self._scatters is not None:
            self._scatters.sums.clear()
        self._used = {}
        self._gradients = {}
        self._added.clear()

    def abort(self) -> None:
        for world in (self.world, self._owners, self._replicas, self._gather_world):
            world.abort()
        if self._scatters is not None:
            self._scatters.abandon()
        for unit in self._units:
            unit.abandon()
        self.discard()

    def reopen(self, world: World, model_world: World) -> None:
        check_members(self.world, world)
        check_not_torn(world, applied=False)  # what was applied is seen by everybody who gathers it
        if self._replicas.size > 1:
            raise ConfigError(
                "zero3 in several replicas cannot go on with other groups yet; start from a checkpoint."
            )
        self.world = world
        self._model_world = model_world
        self._owners = world if self._units else self._owners
        self._rows.world = self._owners
        if self._gathers is not None and self._scatters is not None:
            self._gather_world = self._owners.new_group()
            self._gathers.reopen(self._gather_world)
            self._scatters.reopen(self._owners)

    def gradients(self) -> dict[str, torch.Tensor]:
        return {name: self._rows.join(name, self._gradients[name]) for name in self._having()}

    def parameters(self) -> dict[str, torch.Tensor]:
        names = [name for name, _ in self.module.named_parameters()]
        return {name: self._rows.join(name, self._rows.of(name)) for name in names}

    def parameter_shards(self) -> list[LocalShard]:
        for unit in self._units:  # an evaluation leaves copies, which would be old if somebody fills the rows
            unit.reshard()
        return [self._rows.held(name) for name, _ in self.module.named_parameters()]

    def gradient_shards(self) -> list[LocalShard]:
        return [replace(self._rows.held(name), tensor=self._gradients[name]) for name in self._having()]

    def optimizer_shards(self) -> list[LocalShard]:
        held = [replace(self._rows.held(name), tensor=t) for name, t in self._targets.items()]
        return [one for one in held if one.tensor.numel() or one.name in self._rows.whole]

    def optimizer_state(self) -> State:
        return self._rows.state(self.optimizer, self._targets)

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        self._rows.load_state(self.optimizer, self._targets, state)

    @classmethod
    def cost(
        cls, options: UnitOptions, profile: ModelProfile, mesh: Mesh, compressor: Compressor | None = None
    ) -> Cost:
        del compressor
        shards = mesh.data.size // options.replicas
        rank = mesh.data.rank % shards
        cut, whole = cut_and_whole(profile, shards)
        units = unit_sizes(profile, cut, shards, options.gather)
        held = {p.name: rows_held(p, shards, rank) for p in cut} | {p.name: p.numel for p in whole}
        learning = [p for p in cut if p.trained]
        rows = [held[p.name] * p.dtype.itemsize for p in learning]
        others = [p.nbytes for p in whole if p.trained]
        resident = {
            "parameters": sum(padded_bytes(p, shards) for p in cut) + sum(p.nbytes for p in whole),
            "buffers": profile.buffers,
            "gradients": sum(padded_bytes(p, shards) for p in learning) + sum(others),
            "optimizer": sum(p.state_of(held[p.name]) for p in profile.trained if held[p.name]),
            "working": gathered_at_once(units, options.reshard and profile.stages is None),
        }
        sent = sum(ring_bytes(nbytes, mesh.data.size) for nbytes in others)
        sent += unit_traffic(profile, units, shards, options)
        sent += replica_traffic(profile, units, rows, shards, options.replicas)
        owners = World(rank, shards, mesh.data.device, [""] * shards)
        agreement = agreement_cost(profile, mesh.data, owners, mesh)
        if profile.stages is not None:  # who had a gradient is asked before gradients are summed, too
            agreement += agreement_cost(replace(profile, norm=False), mesh.data, owners, mesh)
        return Cost(resident, {"data": sent}) + agreement

    @classmethod
    def elements_held(cls, options: UnitOptions, parameter: ParameterProfile, mesh: Mesh) -> int:
        shards = mesh.data.size // options.replicas
        if shards == 1 or not can_be_cut([parameter])[0]:
            return parameter.numel
        return rows_held(parameter, shards, mesh.data.rank % shards)

    def _having(self) -> list[str]:
        """The parameters that had a gradient somewhere."""
        return [name for name in self._learning if self._used.get(name)]

    def _sums(self) -> list[torch.Tensor]:
        """The vectors that hold the gradients of this worker's rows; all of them, or as few as there are."""
        if self._scatters is not None and not self._at_once:
            return [self._scatters.sums[name] for name in sorted(self._scatters.sums)]
        return [self._gradients[name] for name in self._having() if name in self._rows.parts]

    def _held(self) -> list[torch.Tensor]:
        sums = self._sums()
        if self._scatters is not None and not self._at_once:
            sums += [self._gradients[name] for name in self._added if name in self._rows.parts]
        return sums + [self._gradients[n] for n in self._having() if n in self._rows.whole]

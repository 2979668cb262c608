"""Divide a model over the mesh: layers over the tensor axis, stages over the pipeline.

Both begin with a trial: one forward pass of the whole model on a real micro-batch, the same on every rank, shows how
data flows through it. What is found there is proved before anything is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from shoal.call import call_model
from shoal.data.batch import Batch, Inputs
from shoal.errors import ConfigError
from shoal.pipeline.base import Schedule
from shoal.pipeline.spine import undisturbed
from shoal.pipeline.split import Split, find_split, span_costs
from shoal.pipeline.trim import trim
from shoal.tensor import Cuts, TensorLayout, TensorOptions, apply_cuts, check_options, find_cuts
from shoal.train.technique.loss import Loss, as_sum_and_count
from shoal.train.technique.precision import Precision
from shoal.train.technique.split_check import can_split, meets, parameters_behind, standing
from shoal.world.mesh import Mesh

OTHER_DRAWS = (
    "the model or its loss draws from Python's or numpy's generator, and under tpN workers that hold parts of one "
    "layer must draw alike; draw from torch, as in torch.rand(()).item(), or leave tpN out."
)

Speeds = Callable[[Sequence[float]], Sequence[float]]
"""From the seconds that a pass of the whole model took each worker to the speed of each rank of a pipeline; empty: all
alike."""


@dataclass(frozen=True)
class Trial:
    """One micro-batch, and how the model is called with it."""

    model: nn.Module
    batch: Batch
    inputs: Inputs
    loss: Loss
    precision: Precision
    device: torch.device

    def run(self) -> object:
        """One forward pass."""
        return call_model(self.model, self.inputs(self.batch))

    @contextmanager
    def calm(self) -> Iterator[Callable[[], None]]:
        """Passes in here leave no trace: no gradients, no statistics, no random numbers used up.

        Gives what puts the model back for the next of them.
        """
        try:
            with undisturbed(self.model) as put_back, torch.no_grad(), self.precision.context(self.device):
                yield put_back
        except RuntimeError as error:
            if not is_differentiating(error):
                raise
            raise ConfigError(
                "the model or its loss differentiates as it runs, and where a plan divides the model, that cannot be "
                f"followed ({str(error).splitlines()[0]}); use a plan without tpN and ppN, such as ddp."
            ) from None

    def loss_dtype(self) -> torch.dtype:
        """What the loss is in."""
        with self.calm():
            try:
                output = self.run()
                with torch.enable_grad():
                    returned = self.loss(output, self.batch)
            except NameError as error:  # such as `run`, of which the loss wants to gather
                raise ConfigError(
                    f"a pipeline tries the loss while the run is being made, and loss= uses '{error.name}', which is "
                    "not there yet; define it before. run.gather cannot work in a pipeline, whose micro-batches come "
                    "one after the other: leave ppN out."
                ) from None
            self._check_own(returned)
            return as_sum_and_count(returned, self.batch)[0].dtype

    def samples_meet(self) -> bool:
        """Whether outputs for half of the samples differ from those for the same among all, in evaluation mode."""
        if not can_split(self.batch):
            return False
        with self.calm() as put_back:

            def restored() -> None:
                put_back()
                self.model.eval()

            restored()
            try:
                return meets(lambda batch: call_model(self.model, self.inputs(batch)), self.batch, restored)
            except Exception:  # a model that fails on half a batch has said nothing
                return False

    def _check_own(self, returned: object) -> None:
        """The last stage, which computes the loss, has no parameters but its own."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        used = next((names[id(p)] for p in parameters_behind(returned) if id(p) in names), None)
        if used is not None:
            raise ConfigError(
                f"loss= uses parameter '{used}' of the model, and the stage of the pipeline that computes the loss may "
                "not have it; give a term on the weights as penalty=, let forward return what the loss needs, or leave "
                "ppN out."
            )


def is_differentiating(error: RuntimeError) -> bool:
    """Whether autograd was asked for gradients where none are recorded."""
    return "does not require grad" in str(error)


@dataclass(frozen=True)
class Tie:
    """One weight that several stages hold."""

    mine: tuple[str, ...]
    """Its names on this worker."""
    dtype: torch.dtype


@dataclass(frozen=True)
class Divided:
    """How this worker's part of the model came about."""

    layout: TensorLayout = field(default_factory=lambda: TensorLayout({}, 1))
    split: Split | None = None
    same: Mapping[str, str] = field(default_factory=dict)
    """Names of this worker's copies of a weight or buffer whose value another stage knows -> its name there."""
    ties: Sequence[Tie] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    loss_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class Division:
    """Where a model can be divided. It holds names and numbers; the model is still whole."""

    cuts: Cuts | None
    split: Split | None
    loss_dtype: torch.dtype


def cut_layers(trial: Trial, mesh: Mesh, rules: Mapping[str, str], options: TensorOptions) -> Cuts:
    """What can be cut over the tensor axis; refuses what cannot."""
    before = standing()[1:]
    with trial.calm():
        cuts = find_cuts(trial.model, trial.run, mesh.tensor.size, rules)
    if before != standing()[1:]:
        raise ConfigError(OTHER_DRAWS)
    check_options(cuts, options)
    return cuts


def find_division(
    trial: Trial,
    mesh: Mesh,
    rules: Mapping[str, str],
    options: TensorOptions,
    schedule: type[Schedule],
    split_at: str,
    speeds_of: Speeds = lambda _: (),
) -> Division:
    """Where the model can be divided over the mesh; refuses what cannot be."""
    cuts = cut_layers(trial, mesh, rules, options) if mesh.tensor.size > 1 else None
    split, dtype = None, torch.float32
    if mesh.stages.size > 1:
        if cuts is not None and options.sequence:
            raise ConfigError(
                "tp(sequence=true) hands slices of a sequence from layer to layer, and a pipeline would cut between "
                "them; use one of the two."
            )
        dtype = trial.loss_dtype()
        named = [name for name in split_at.split("/") if name]
        with trial.calm():
            inputs = trial.inputs(trial.batch)
            together = cuts.groups() if cuts is not None else ()
            measured = mesh.world.gather_values(span_costs(trial.model, inputs, named, together))
            stages = schedule.stages_per_rank * mesh.stages.size
            speeds = speeds_of([sum(costs) for costs in measured])
            by_stage = (
                [speeds[schedule.rank_of(n, mesh.stages.size)] for n in range(stages)] if speeds else ()
            )
            split = find_split(trial.model, inputs, stages, named, measured[0], together, by_stage)
    return Division(cuts, split, dtype)


def divide(
    model: nn.Module, found: Division, mesh: Mesh, options: TensorOptions, schedule: type[Schedule]
) -> Divided:
    """Cut the model in place to what this worker holds."""
    cuts, split = found.cuts, found.split
    layout = TensorLayout({}, 1)
    if cuts is not None:
        assert mesh.torch is not None
        layout = apply_cuts(model, cuts, mesh.torch["tensor"], options)
    if split is None:
        return Divided(layout, shares=_shares(model, layout, {}))
    mine = {n for n in range(len(split.stages)) if schedule.rank_of(n, mesh.stages.size) == mesh.stages.rank}
    dtypes = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
    ties, same = [], {}
    for group in split.tied:
        held = tuple(dict.fromkeys(name for number, name in group if number in mine))
        first = group[0][1]
        ties.append(Tie(held, dtypes[first]))
        if group[0][0] not in mine:
            same.update({name: first for number, name in group[1:] if number in mine})
    # Where several stages hold a buffer, the stage that uses it knows its value.
    lent = [name for name, _ in model.named_buffers() if split.owners[name] not in mine]
    same.update(zip(lent, lent, strict=True))
    trim(model, split.stages, mine)
    return Divided(layout, split, same, ties, _shares(model, layout, same), found.loss_dtype)


def _shares(model: nn.Module, layout: TensorLayout, same: Mapping[str, str]) -> dict[str, float]:
    names = [name for name, _ in model.named_parameters()]
    return {name: 0.0 if name in same else layout.shares(name) for name in names}

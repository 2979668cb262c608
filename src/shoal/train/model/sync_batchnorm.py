"""Batch normalisation over all workers, `batchnorm="sync"`: equal to one process on the whole batch.

torch's SyncBatchNorm is for GPUs only; this runs wherever the workers' collectives do. Every worker contributes its
count, mean and squared deviations, one row of a table; all of them combine the rows in rank order, so all hold the
same bits. Backward exchanges two sums in the same way.

Paper: Ioffe and Szegedy 2015, "Batch Normalization"; the rows are combined as in Chan, Golub and LeVeque 1979.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from shoal.errors import ConfigError
from shoal.torch_private import BatchNormBase, check_input_dim
from shoal.world.world import World


@dataclass
class Presence:
    """Whether this worker has samples of its own in the micro-batch it computes now.

    Where it has none, `counts` is False: it runs a filler through the model, which takes part in every collective and
    counts nothing. Its gradients are zero below the last batch normalisation; that its loss counts nothing is for
    the caller to see to.
    """

    counts: bool = True
    own: Sequence[BatchNormBase] = ()
    """Layers that see this worker's samples alone: a filler must neither reach their statistics nor be too short."""
    _still: list[BatchNormBase] = field(default_factory=list)

    def see(self, counts: bool) -> None:
        """The next micro-batch has samples of this worker's own, or none."""
        if counts != self.counts:
            self.counts = counts
            if counts:
                for layer in self._still:
                    layer.train()
            else:
                self._still = [layer for layer in self.own if layer.training]
                for layer in self._still:
                    layer.eval()


def own_batchnorm(model: nn.Module) -> Presence:
    """Let every batch normalisation see this worker's samples alone.

    >>> model = nn.Sequential(nn.BatchNorm1d(8))
    >>> own_batchnorm(model).see(False)
    >>> model[0].training
    False
    """
    return Presence(own=[module for module in model.modules() if isinstance(module, BatchNormBase)])


def say_of_own_batchnorm(model: nn.Module, parts: int) -> None:
    """Say that layers see a part of each step's samples, where one process would let them see all."""
    measuring = any(isinstance(layer, BatchNormBase) and layer.training for layer in model.modules())
    if measuring and parts > 1:
        print(
            f"shoal: batch normalisation sees one of a step's {parts} parts at a time, as in torch's DDP: other "
            "numbers than one process has. batchnorm='sync' lets it see all samples, and is equal.",
            file=sys.stderr,
            flush=True,
        )


def has_batchnorm(model: nn.Module) -> bool:
    """Whether any layer normalises over the batch.

    >>> has_batchnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))), has_batchnorm(nn.LayerNorm(8))
    (True, False)
    """
    return any(isinstance(module, BatchNormBase) for module in model.modules())


def sync_batchnorm(model: nn.Module, world: World, presence: Presence) -> nn.Module:
    """Let every batch normalisation of the model see the samples of all workers of `world`. In place.

    Layers keep their identity, hooks, parameters, buffers and names, and are still of torch's class. In training all
    workers must call the same layers in the same order, forward and backward.

    >>> model = sync_batchnorm(nn.Sequential(nn.BatchNorm1d(8)), World.alone(), Presence())
    >>> isinstance(model[0], nn.BatchNorm1d), sorted(model.state_dict())[0]
    (True, '0.bias')
    """
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, BatchNormBase)]
    for name, layer in layers:
        if type(layer) not in KINDS:
            raise ConfigError(
                f"batchnorm='sync' cannot take over layer '{name}', a {type(layer).__name__}, which may compute "
                "something of its own; use nn.BatchNorm1d, 2d or 3d with the number of channels given, or leave "
                "batchnorm out."
            )
    workers = _Workers(world, presence)
    for _, layer in layers:
        layer.__class__ = KINDS[type(layer)]
        assert isinstance(layer, _OverWorkers)
        layer.workers = workers
    return model


class _Workers:
    """Who normalises together. A copy of a model, such as a running average of it, belongs to the same workers."""

    def __init__(self, world: World, presence: Presence) -> None:
        self.world = world
        self.presence = presence

    def __deepcopy__(self, _: object) -> _Workers:
        return self

    def add_up(self, row: Tensor | None, width: int, device: torch.device) -> Tensor:
        """A float64 table with one row per rank, the same bits everywhere; zeros for those who have none."""
        table = torch.zeros(self.world.size, width, dtype=torch.float64, device=device)
        if row is not None:
            table[self.world.rank] = row
        self.world.all_reduce(table).wait()  # every other row is zero, so the sum is exact
        return table


@dataclass(frozen=True)
class _Moments:
    """Of each channel, over all workers."""

    count: int
    mean: Tensor
    deviation: Tensor
    """The sum of squared deviations from the mean."""


class _OverWorkers(BatchNormBase):
    """What the layers below have in common. In evaluation they are torch's layers, each worker by itself."""

    workers: _Workers

    def forward(self, input: Tensor) -> Tensor:
        counts = self.workers.presence.counts
        if not self.training or (self.workers.world.size == 1 and counts):
            return BatchNormBase.forward(self, input)
        check_input_dim(self, input)
        if self.eps <= 0.0:
            raise ValueError(f"batch_norm eps must be positive during training, but got {self.eps}")
        counts = counts and input.numel() > 0
        moments = _measure(input.detach(), self.workers, counts)
        if moments.count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got input size {input.size()} "
                "and nothing on the other workers"
            )
        self._track(moments)
        output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, moments, self.eps, self.workers, counts
        )
        return output

    @torch.no_grad()
    def _track(self, moments: _Moments) -> None:
        """Let the running statistics follow; a micro-batch without any sample leaves no trace."""
        if not self.track_running_stats or moments.count == 0:
            return
        factor = 0.0 if self.momentum is None else self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # the mean of all batches so far
                factor = 1.0 / float(self.num_batches_tracked)
        for running, now in (
            (self.running_mean, moments.mean),
            (self.running_var, moments.deviation / (moments.count - 1)),
        ):
            if running is not None:
                running.copy_(running.double() * (1.0 - factor) + now * factor)


class _OverWorkers1d(_OverWorkers, nn.BatchNorm1d):
    """Takes what nn.BatchNorm1d takes."""


class _OverWorkers2d(_OverWorkers, nn.BatchNorm2d):
    """Takes what nn.BatchNorm2d takes."""


class _OverWorkers3d(_OverWorkers, nn.BatchNorm3d):
    """Takes what nn.BatchNorm3d takes."""


class _OverWorkersAny(_OverWorkers, nn.SyncBatchNorm):
    """Takes inputs of any number of dimensions, as nn.SyncBatchNorm does."""


KINDS: Mapping[type[nn.Module], type[_OverWorkers]] = MappingProxyType(
    {
        nn.BatchNorm1d: _OverWorkers1d,
        nn.BatchNorm2d: _OverWorkers2d,
        nn.BatchNorm3d: _OverWorkers3d,
        nn.SyncBatchNorm: _OverWorkersAny,
    }
    | {kind: kind for kind in (_OverWorkers1d, _OverWorkers2d, _OverWorkers3d, _OverWorkersAny)}
)


def _measure(x: Tensor, workers: _Workers, counts: bool) -> _Moments:
    """Count, mean and squared deviations of all workers' values, from those of each."""
    channels = x.shape[1]
    row = None
    if counts:
        n = x.numel() // channels
        variance, mean = torch.var_mean(x.to(_precise(x.dtype)), _but_channels(x), correction=0)
        row = torch.cat((mean.double(), variance.double() * n, mean.new_tensor([n], dtype=torch.float64)))
    table = workers.add_up(row, 2 * channels + 1, x.device)
    means, deviations, counted = table[:, :channels], table[:, channels:-1], table[:, -1:]
    count = int(counted.sum())
    if count == 0:
        return _Moments(0, torch.zeros_like(means[0]), torch.zeros_like(means[0]))
    mean = _in_rank_order(means * counted) / count
    return _Moments(count, mean, _in_rank_order(deviations + counted * (means - mean).square()))


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) · weight + bias, where mean and variance depend on all workers' x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        moments: _Moments,
        eps: float,
        workers: _Workers,
        counts: bool,
    ) -> Tensor:
        precise, count = _precise(x.dtype), max(moments.count, 1)
        mean = moments.mean.to(precise)
        inverse = (moments.deviation / count + eps).rsqrt().to(precise)
        scale = inverse if weight is None else (inverse * weight).to(precise)
        shift = torch.zeros_like(mean) if bias is None else bias.to(precise)
        ctx.save_for_backward(x, mean, inverse, scale)
        ctx.count = count
        ctx.workers = workers
        ctx.counts = counts
        ctx.dtypes = [tensor.dtype for tensor in (weight, bias) if tensor is not None]
        centred = x - _spread(mean, x)
        return torch.addcmul(_spread(shift, x), centred, _spread(scale, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, inverse, scale = ctx.saved_tensors
        dy = gradients[0].to(mean.dtype)
        centred = x - _spread(mean, x)
        channels, over = x.shape[1], _but_channels(x)
        row = torch.cat((dy.sum(over), (dy * centred).sum(over))).double()
        if not ctx.counts:
            row = torch.zeros_like(row)  # a filler: whatever its loss was
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            total = _in_rank_order(ctx.workers.add_up(row, 2 * channels, x.device)) / ctx.count
            along = (total[channels:] * inverse.double().square()).to(mean.dtype)
            dx = dy - _spread(total[:channels].to(mean.dtype), x) - centred * _spread(along, x)
            dx = (dx * _spread(scale, x)).to(x.dtype) if ctx.counts else torch.zeros_like(x)
        # Parameters get the sums over this worker's samples: the exchange adds them up, as all other gradients.
        if ctx.needs_input_grad[1]:
            dweight = (row[channels:] * inverse.double()).to(ctx.dtypes[0])
        if ctx.needs_input_grad[2]:
            dbias = row[:channels].to(ctx.dtypes[-1])
        return dx, dweight, dbias, None, None, None, None


def _in_rank_order(rows: Tensor) -> Tensor:
    """Their sum, one after the other: a library's sum may take another order on another processor."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total


def _precise(dtype: torch.dtype) -> torch.dtype:
    """What to compute in: half precision is for storing."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _spread(channel: Tensor, x: Tensor) -> Tensor:
    return channel.view(1, -1, *[1] * (x.ndim - 2))

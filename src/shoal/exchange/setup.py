"""What an exchange is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.compress.base import Compressor
from shoal.optimizer import MakeOptimizer
from shoal.report.spans import Spans
from shoal.world.world import World


@dataclass(frozen=True)
class NoOptions:
    """For choices without options."""


@dataclass(frozen=True)
class BucketOptions:
    """Options of the flat-bucket exchanges."""

    bucket_mb: float = 16.0
    """Gradients travel in vectors of about this many megabytes."""


@dataclass(frozen=True)
class Setup:
    """What an exchange is made from."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    world: World
    accumulate: int = 1
    deterministic: bool = False
    model_world: World = field(default_factory=World.alone)
    """The ranks that hold one model between them; `world` holds ranks with the same parameters and other samples."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """How much of each parameter counts here for the norm of the whole model; what is not named counts fully."""
    mesh: DeviceMesh | None = None
    """The mesh in torch's own form: axis "shard", and of replica, stage and tensor those with several workers."""
    blocks: Sequence[str] = ()
    """The names of the whole model's blocks; some of them may be in other stages."""
    root: nn.Module | None = None
    """The module that runs in place of the model: a pipeline stage, which has the model inside."""
    peers: World | None = None
    """The workers of `world` with a group; None where they have none."""
    order: Sequence[str] = ()
    """Parameters in the order their gradients will become ready, where that is known before the first step."""
    recorded: bool = False
    """Whether somebody writes down the gradients of every step."""
    seed: int = 0
    """Seed of the run: initial rows of embeddings follow from it."""
    spans: Spans = field(default_factory=Spans)
    """Where the collective of each bucket is noted."""
    compressor: Compressor | None = None
    """The compressor of gradients; None: they travel as they are."""
    elsewhere: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """In a pipeline: all that learns in the whole model, by name and without memory, for the user's function that makes
    the optimizer: it may sort parameters by their place."""
    same: Mapping[str, str] = field(default_factory=dict)
    """This worker's name of a weight that other stages hold too -> its name in the whole model."""
    values: Callable[[str], torch.Tensor] | None = None
    """Where the model is on the meta device: the initial value of one of its parameters or buffers."""

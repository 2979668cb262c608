"""One pass of a model on tensors without memory: operations, what autograd keeps, and both for each block.

A model of any size is traced in seconds and no parameter is allocated. A model whose forward looks at values cannot be
traced; it is profiled by running it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from shoal.blocks import find_blocks
from shoal.call import Call
from shoal.data.stream import make_loader
from shoal.exchange.contract import trainable
from shoal.partition.block import BlockPartition
from shoal.plan.check import check_text
from shoal.torch_private import FakeTensorMode, storage_address, tree_map
from shoal.train.build import inputs_of, make_feed
from shoal.train.model.make import make_model
from shoal.train.run_config import RunConfig
from shoal.train.technique import precision
from shoal.train.technique.loss import as_sum_and_count
from shoal.train.technique.own_loss import as_returned
from shoal.world.mesh import Mesh
from shoal.world.world import World


class CannotTrace(Exception):
    """The model looks at values, or cannot do without memory; the text says how."""


@dataclass(frozen=True)
class Block:
    """One block of a model in a traced pass."""

    name: str
    flops: int
    """Forward."""
    kept: int
    """Bytes that autograd keeps of what happens inside."""
    inputs: int
    """Bytes of what goes in."""


@dataclass(frozen=True)
class Traced:
    """One pass over so many samples."""

    samples: int
    forward_flops: int
    flops: int
    """Forward and backward."""
    kept: int
    """Bytes that autograd keeps from forward to backward, without parameters."""
    largest: int
    """Bytes of the largest tensor that is kept."""
    blocks: tuple[Block, ...] = ()

    @property
    def peak(self) -> int:
        """Bytes at the peak of the pass: what is kept, a gradient of the largest tensor, and what that comes from."""
        return self.kept + 2 * self.largest

    @property
    def recomputed_peak(self) -> int:
        """The same with recompute='blocks': inputs of blocks, and one block's inside at a time.

        >>> Traced(1, 0, 0, 100, 10, (Block("a", 0, 40, 5), Block("b", 0, 40, 5))).recomputed_peak
        90
        """
        inside = sum(block.kept for block in self.blocks)
        inputs = sum(block.inputs for block in self.blocks)
        most = max((block.kept for block in self.blocks), default=0)
        return self.kept - inside + inputs + most + 2 * self.largest


@dataclass
class _Kept:
    """What autograd keeps, each memory once."""

    known: set[int]
    bytes: int = 0
    largest: int = 0
    alive: list[torch.Tensor] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        key = storage_address(tensor)
        if key not in self.known:
            self.known.add(key)
            nbytes = tensor.untyped_storage().nbytes()
            self.bytes += nbytes
            self.largest = max(self.largest, nbytes)
            self.alive.append(tensor)  # an address must not be used again
        return tensor


def trace(config: RunConfig, samples: int) -> Traced:
    """Trace one micro-batch of so many samples. Raises CannotTrace."""
    try:
        return _trace(config, samples)
    except CannotTrace:
        raise
    except Exception as error:  # whatever a model does with values that are not there
        raise CannotTrace(
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
        ) from None


def _trace(config: RunConfig, samples: int) -> Traced:
    if config.step is not None:
        raise CannotTrace("it has a step of its own")
    chosen = precision.TABLE.look_up(config.precision)
    model, _ = make_model(config.model, config.seed, chosen.model, deferred=True)
    batch = _batch(config, samples)
    loss, inputs = config.loss or as_returned, inputs_of(config, model)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        tensors = _without_memory(model, mode)
        fake_batch = tree_map(partial(_faked, mode), batch)
        given = inputs(fake_batch)
        kept = _Kept({storage_address(t) for t in tensors.values()})
        counter = FlopCounterMode(display=False)
        blocks: dict[str, Block] = {}
        with (
            counter,
            torch.enable_grad(),
            _watching(model, counter, kept, blocks),
            chosen.context(torch.device("cpu")),
        ):
            with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
                args, kwargs = (given.args, given.kwargs) if isinstance(given, Call) else ((given,), {})
                output = functional_call(model, tensors, args, kwargs)
                total, _ = as_sum_and_count(loss(output, fake_batch), fake_batch)
            forward = counter.get_total_flops()
            total.backward()  # type: ignore[no-untyped-call]
    return Traced(
        samples, forward, counter.get_total_flops(), kept.bytes, kept.largest, tuple(blocks.values())
    )


def _faked(mode: FakeTensorMode, value: object) -> object:
    return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value


def _batch(config: RunConfig, samples: int) -> object:
    """The first samples of the run, as one process would have them."""
    few = replace(config, global_batch=samples, accumulate=1)
    feed = make_feed(few, check_text("ddp", 1), Mesh.open(World.alone()))
    plain = replace(feed, rank=0, workers=0, partition=BlockPartition(), columns={})
    return make_loader(plain).take(0).batches[0]


def _without_memory(model: nn.Module, mode: FakeTensorMode) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, of the same kind and without memory; ties stay ties."""
    learning = {id(p) for p in trainable(model).values()}
    made: dict[int, torch.Tensor] = {}
    found = {}
    with mode:
        for name, tensor in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]:
            if id(tensor) not in made:
                empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
                made[id(tensor)] = empty.requires_grad_(id(tensor) in learning)
            found[name] = made[id(tensor)]
    return found


@contextmanager
def _watching(
    model: nn.Module, counter: FlopCounterMode, kept: _Kept, blocks: dict[str, Block]
) -> Iterator[None]:
    """Note what happens inside of each block."""
    began: dict[str, tuple[int, int]] = {}

    def begin(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            del module
            inputs = [
                t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.is_floating_point()
            ]
            blocks[name] = Block(name, 0, 0, sum(t.nbytes for t in inputs))
            began[name] = counter.get_total_flops(), kept.bytes

        return hook

    def end(name: str) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> None:
            del module, args, output
            flops, nbytes = began[name]
            blocks[name] = replace(
                blocks[name], flops=counter.get_total_flops() - flops, kept=kept.bytes - nbytes
            )

        return hook

    with ExitStack() as hooks:
        for name in find_blocks(model):
            block = model.get_submodule(name)
            hooks.callback(block.register_forward_pre_hook(begin(name), with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(end(name)).remove)
        yield

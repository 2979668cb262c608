"""Activation checkpointing, `recompute="blocks"`: a block's activations are computed again when backward needs them.

Memory for activations falls to the blocks' inputs plus the inside of one block; a step computes one more forward
pass. When to use: activations, not parameters, fill the memory.

Paper: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shoal.errors import ConfigError
from shoal.torch_private import NormBase, buffers_of, version_of


def recompute_blocks(model: nn.Module, names: Sequence[str]) -> None:
    """Let the named blocks keep only their inputs for backward. In place; names of parameters do not change.

    Gradients are the same bits: dropout draws the same numbers again, and buffers that a block changes, such as the
    statistics of batch normalisation, change once.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> recompute_blocks(model, ["0", "1"])
    >>> [name for name, _ in model.named_parameters()]
    ['0.weight', '0.bias', '1.weight', '1.bias']
    """
    if not names:
        raise ConfigError(
            f"recompute='blocks' finds no blocks in {type(model).__name__}: no list of layers that are alike, and no "
            "large part that is a module of its own; put its layers into an nn.Sequential or nn.ModuleList, or leave "
            "recompute out."
        )
    for name in names:
        block = model.get_submodule(name)
        # An attribute of the instance takes the place of the class's method. A module around the block would
        # change its parameters' names; and hooks, such as those of FSDP2, stay outside of what runs again.
        block.forward = _Recomputed(block)


def recomputes(model: nn.Module) -> bool:
    """Whether blocks of the model are computed again."""
    return any(isinstance(vars(module).get("forward"), _Recomputed) for module in model.modules())


class _Recomputed:
    """The forward of a block, under checkpointing."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._forward = block.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        before = {name: buffer.clone() for name, buffer in self._buffers().items()}
        versions = {name: (id(buffer), version_of(buffer)) for name, buffer in self._buffers().items()}
        output = checkpoint(
            self._forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=True,
            context_fn=lambda: (nullcontext(), _buffers_as(self._block, before)),
            **kwargs,
        )
        # Most buffers are constants: keep no copy of them until backward. torch counts every change of a tensor but
        # those that its own normalisation makes to running statistics.
        statistics = {id(buffer) for norm in self._norms() for buffer in norm.buffers()}
        for name, buffer in self._buffers().items():
            if versions.get(name) == (id(buffer), version_of(buffer)) and id(buffer) not in statistics:
                del before[name]
        return output

    def _buffers(self) -> dict[str, Tensor]:
        return dict(self._block.named_buffers(remove_duplicate=False))

    def _norms(self) -> Iterator[nn.Module]:
        return (module for module in self._block.modules() if isinstance(module, NormBase))


@contextmanager
def _buffers_as(block: nn.Module, before: Mapping[str, Tensor]) -> Iterator[None]:
    """Let the block see its buffers as they were, and forget what it does to them."""
    owners = {name: buffers_of(block.get_submodule(name.rpartition(".")[0])) for name in before}
    kept = {name: owner[name.rpartition(".")[2]] for name, owner in owners.items()}
    for name, owner in owners.items():
        owner[name.rpartition(".")[2]] = before[name].clone()
    try:
        yield
    finally:
        for name, owner in owners.items():
            owner[name.rpartition(".")[2]] = kept[name]

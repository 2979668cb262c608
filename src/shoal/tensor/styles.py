"""How a cut layer computes: one `ParallelStyle` per kind, for torch's `parallelize_module`.

Parameters are DTensors, so that everybody knows what they are a part of; the arithmetic is done on their local parts
as plain tensors, with the moves between ranks written out. Torch's own styles know neither packed matrices, nor
attention, nor masks that are drawn as one process draws them. Here one mechanism serves all kinds of cut.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn import functional as F

from shoal.tensor.attention import LocalAttention, local_of
from shoal.tensor.draws import Draws
from shoal.tensor.layout import TensorCut
from shoal.tensor.moves import Move, Ring, collect, enter, leave
from shoal.tensor.projection import bias_of, project, weight_of
from shoal.torch_private import reparametrize_module

Forward = Callable[..., object]


def same(x: Tensor) -> Tensor:
    """The move that does nothing."""
    return x


class Between:
    """What happens between the columns and the row of one group, while the model runs.

    An input that several columns share (queries, keys and values; a gate) is brought to them once, so that its
    gradient is summed over ranks once.
    """

    def __init__(self, come: Move, go: Move, bias: Move, draws: Draws | None) -> None:
        self.come = come
        self.go = go
        self.bias = bias
        self.draws = draws
        self.last: tuple[Tensor, bool, Tensor] | None = None

    def open(self, x: Tensor) -> Tensor:
        """A column is called with `x`."""
        if self.draws is not None:
            self.draws.inside = True
        grad = torch.is_grad_enabled()
        # Recomputation calls the columns with the same tensor but another grad mode: what was brought without a graph
        # is of no use with one.
        if self.last is None or self.last[0] is not x or self.last[1] != grad:
            self.last = (x, grad, self.come(x))
        return self.last[2]

    def close(self) -> None:
        """The row is called. Before it computes, because recomputing a block may end inside of it."""
        self.last = None
        if self.draws is not None:
            self.draws.inside = False


class _Style(ParallelStyle):
    """Gives a module another forward."""

    def forward_of(self, module: nn.Module) -> Forward:
        raise NotImplementedError

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:  # noqa: ARG002  torch's name
        module.forward = self.forward_of(module)
        return module


class ColumnStyle(_Style):
    """This rank's outputs of a projection."""

    def __init__(self, between: Between) -> None:
        self.between = between

    def forward_of(self, module: nn.Module) -> Forward:
        def forward(x: Tensor) -> Tensor:
            x = self.between.open(x)
            return project(module, x, _part(weight_of(module)), local_of(bias_of(module)))

        return forward


class Row(_Style):
    """A projection of this rank's inputs, summed over ranks."""

    def __init__(self, between: Between) -> None:
        self.between = between

    def forward_of(self, module: nn.Module) -> Forward:
        between = self.between

        def forward(x: Tensor) -> Tensor:
            between.close()
            # The bias after the sum: inside of it, it would be added once for each rank.
            result = between.go(project(module, x, _part(weight_of(module)), None))
            bias = bias_of(module)
            return result if bias is None else result + between.bias(bias)

        return forward


class Head(_Style):
    """The logits of this rank's words, then those of all; as a DTensor that stays cut if a loss can be taken of it."""

    def __init__(self, ring: Ring, words: int, keep: DeviceMesh | None) -> None:
        self.ring = ring
        self.words = words
        self.keep = keep

    def forward_of(self, module: nn.Module) -> Forward:
        sizes = [
            TensorCut(0, (self.words,)).local(self.ring.degree, rank) for rank in range(self.ring.degree)
        ]

        def forward(x: Tensor) -> Tensor:
            x = enter(x, self.ring)
            logits = project(module, x, _part(weight_of(module)), local_of(bias_of(module)))
            if self.keep is None:
                return collect(logits, self.ring, logits.ndim - 1, sizes)
            shape = torch.Size((*logits.shape[:-1], self.words))
            stride = torch.empty(shape, device="meta").stride()
            kept: Tensor = DTensor.from_local(
                logits, self.keep, [Shard(logits.ndim - 1)], run_check=False, shape=shape, stride=stride
            )
            return kept

        return forward


class Words(_Style):
    """An embedding of which this rank has the rows of some words; the others give zero, and the sum is the row."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def forward_of(self, module: nn.Module) -> Forward:
        assert isinstance(module, nn.Embedding)
        rows = TensorCut(0, (module.num_embeddings,))
        start, length = rows.spans(self.ring.degree, self.ring.rank)[0]
        padding = None if module.padding_idx is None else module.padding_idx - start
        # The padding word lies on another rank: F.embedding would take a negative index as counted from the end.
        if padding is not None and not 0 <= padding < length:
            padding = None

        def forward(words: Tensor) -> Tensor:
            row = words - start
            elsewhere = (row < 0) | (row >= length)
            # Any row will do for words of other ranks; it is replaced by zero, and gets no gradient through that.
            found = F.embedding(row.masked_fill(elsewhere, 0), _part(module.weight), padding)
            return leave(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.ring)

        return forward


class Heads(_Style):
    """This rank's heads of an `nn.MultiheadAttention`."""

    def __init__(self, ring: Ring, come: Move, go: Move, bias: Move) -> None:
        self.ring = ring
        self.come = come
        self.go = go
        self.bias = bias

    def forward_of(self, module: nn.Module) -> Forward:
        assert isinstance(module, nn.MultiheadAttention)
        return LocalAttention(module, self.ring, self.come, self.go, self.bias)


class Drawing(_Style):
    """A module in which masks for cut data are drawn; `always` if all of its data is cut."""

    def __init__(self, draws: Draws, always: bool) -> None:
        self.draws = draws
        self.always = always

    def forward_of(self, module: nn.Module) -> Forward:
        before = module.forward
        draws = self.draws

        def _forward(*args: object, **kwargs: object) -> object:
            draws.inside = self.always
            try:
                with draws:
                    return before(*args, **kwargs)
            finally:
                draws.inside = False

        return _forward


class Norm(_Style):
    """A norm on a slice of the sequence: the gradients of its parameters are sums over slices."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring

    def forward_of(self, module: nn.Module) -> Forward:
        before = module.forward

        def _forward(*args: object, **kwargs: object) -> object:
            # Forward this changes nothing; backward it sums what the slices contribute.
            summed = {name: enter(p, self.ring) for name, p in module.named_parameters()}
            with reparametrize_module(module, summed):
                return before(*args, **kwargs)

        return _forward


class Around(_Style):
    """Moves the first tensor that goes into a module, and the first that comes out."""

    def __init__(self, come: Move = same, go: Move = same) -> None:
        self.come = come
        self.go = go

    def forward_of(self, module: nn.Module) -> Forward:
        before = module.forward

        def _forward(*args: object, **kwargs: object) -> object:
            if args:
                args = (_moved(self.come, args[0]), *args[1:])
            else:
                key = "hidden_states" if "hidden_states" in kwargs else "src"
                kwargs = {**kwargs, key: _moved(self.come, kwargs[key])}
            result = before(*args, **kwargs)
            if isinstance(result, Tensor):
                return self.go(result)
            return (self.go(result[0]), *result[1:])

        return _forward


def _moved(move: Move, value: object) -> object:
    if move is same:
        return value
    assert isinstance(value, Tensor), f"a {type(value).__name__} where a module of this kind gets a tensor"
    return move(value)


def _part(parameter: Tensor) -> Tensor:
    local = local_of(parameter)
    assert local is not None
    return local

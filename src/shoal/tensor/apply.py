"""Cut a model in place: parameters become this rank's parts, and layers compute with them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle, loss_parallel, parallelize_module

from shoal.errors import ConfigError
from shoal.tensor.cut import Cut, Cuts, SequenceBlock, TensorOptions
from shoal.tensor.draws import Draws
from shoal.tensor.layout import TensorLayout, cut
from shoal.tensor.moves import Move, Ring, enter, leave, part, rejoin, settle, spread
from shoal.tensor.styles import Around, Between, ColumnStyle, Drawing, Head, Heads, Norm, Row, Words, same
from shoal.torch_private import parameters_of


def loss_context(options: TensorOptions) -> AbstractContextManager[None]:
    """What forward, loss and backward run in.

    >>> loss_context(TensorOptions())  # doctest: +ELLIPSIS
    <contextlib.nullcontext object at ...>
    """
    if options.loss:
        context: AbstractContextManager[None] = loss_parallel()
        return context
    return nullcontext()


def check_options(cuts: Cuts, options: TensorOptions) -> None:
    """Refuse options that this model has no use for; no processes are needed.

    >>> check_options(Cuts((), degree=2), TensorOptions(loss=True))
    Traceback (most recent call last):
    shoal.errors.ConfigError: tp2(loss=true) needs a head that is cut over its vocabulary and whose output the model \
returns; this model has none: leave loss out.
    """
    if options.loss and not cuts.head:
        raise ConfigError(
            f"tp{cuts.degree}(loss=true) needs a head that is cut over its vocabulary and whose output the model "
            "returns; this model has none: leave loss out."
        )
    if options.sequence and not cuts.blocks:
        raise ConfigError(
            f"tp{cuts.degree}(sequence=true) cannot be done here: {cuts.obstacle}; leave sequence out."
        )
    if options.sequence and cuts.length % cuts.degree:
        raise ConfigError(
            f"a sequence of {cuts.length} positions cannot be shared evenly by tp{cuts.degree}(sequence=true); "
            f"pad sequences to a multiple of {cuts.degree}, or leave sequence out."
        )


def apply_cuts(model: nn.Module, cuts: Cuts, mesh: DeviceMesh, options: TensorOptions) -> TensorLayout:
    """Cut `model` in place. Every rank of the 1-D `mesh` calls it with the same whole model."""
    check_options(cuts, options)
    ring = Ring(mesh.get_group(), mesh.get_local_rank(), mesh.size())
    layout = cuts.layout()
    _replace(model, layout, mesh, ring.rank)
    blocks = cuts.blocks if options.sequence else ()
    for members in _groups(cuts).values():
        home = next((block for block in blocks if _below(members[0].module, block.module)), None)
        for module, style in _styles(members, ring, home, (cuts.head, mesh) if options.loss else None):
            parallelize_module(model.get_submodule(module), mesh, style)
        # Such as num_heads: the module reshapes its data by it, and this rank has a part of the heads.
        for attribute in members[0].divide:
            owner = model.get_submodule(members[0].group)
            setattr(owner, attribute, getattr(owner, attribute) // ring.degree)
    for block in blocks:
        for module, style in _block_styles(block, blocks, ring):
            parallelize_module(model.get_submodule(module), mesh, style)
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            # Torch's fused layer asks for this, and it would read weights that are not whole.
            layer.activation_relu_or_gelu = 0
    return layout


def _replace(model: nn.Module, layout: TensorLayout, mesh: DeviceMesh, rank: int) -> None:
    # One new parameter per old one, put wherever the old one was: tied weights stay tied.
    new: dict[int, nn.Parameter] = {}
    for name, old in model.named_parameters(remove_duplicate=False):
        if name in layout.pieces and id(old) not in new:
            local = cut(name, old.detach(), layout, rank)
            placed = DTensor.from_local(
                local,
                mesh,
                [Shard(layout.pieces[name].dim)],
                run_check=False,
                shape=old.shape,
                stride=torch.empty(old.shape, device="meta").stride(),
            )
            new[id(old)] = nn.Parameter(placed, old.requires_grad)
    for module in model.modules():
        for own, held in parameters_of(module).items():
            if id(held) in new:
                parameters_of(module)[own] = new[id(held)]


def _groups(cuts: Cuts) -> dict[str, list[Cut]]:
    groups: dict[str, list[Cut]] = {}
    for one in cuts.cuts:
        groups.setdefault(one.group or f"alone {one.module}", []).append(one)
    return groups


def _styles(
    members: list[Cut], ring: Ring, home: SequenceBlock | None, kept: tuple[str, DeviceMesh] | None
) -> list[tuple[str, ParallelStyle]]:
    """The style of each module of a group; `home` if it lies in a block that works on slices of the sequence."""
    come: Move = partial(enter, ring=ring)
    go: Move = partial(leave, ring=ring)
    bias: Move = same
    if home is not None:
        # Sequence parallelism: between blocks each rank holds a slice of the sequence, so all-gather and reduce-scatter
        # take the place of identity and all-reduce: the same bytes.
        come, go = partial(spread, ring=ring, dim=home.dim), partial(settle, ring=ring, dim=home.dim)
        # The bias is added to this rank's slice only: its gradient is a sum over ranks.
        bias = partial(enter, ring=ring)
    first = members[0]
    found: list[tuple[str, ParallelStyle]] = []
    draws = None
    if first.dropped is not None:
        size = sum(first.parameters[0][1].groups) if first.axis == -1 else None
        # Dropout masks are drawn for the whole, of which each rank uses its part: as in one process.
        draws = Draws(ring, first.axis, size)
        found.append((first.dropped, Drawing(draws, always=False)))
    if home is not None and first.group == home.attention:
        found.append(
            (first.group, Around(come))
        )  # it shapes its data by what comes in, so that must be whole
        come = same
    between = Between(come, go, bias, draws)
    for one in members:
        words = sum(one.parameters[0][1].groups)
        style: ParallelStyle
        match one.how:
            case "column":
                style = ColumnStyle(between)
            case "row":
                style = Row(between)
            case "heads":
                first_is_time = partial(settle, ring=ring, dim=0) if home is not None else go
                style = Heads(ring, come, first_is_time, bias)
            case "vocabulary":
                style = Words(ring)
            case _:
                style = Head(ring, words, kept[1] if kept and kept[0] == one.module else None)
        found.append((one.module, style))
    return found


def _block_styles(
    block: SequenceBlock, blocks: tuple[SequenceBlock, ...], ring: Ring
) -> list[tuple[str, ParallelStyle]]:
    found: list[tuple[str, ParallelStyle]] = [(norm, Norm(ring)) for norm in block.norms]
    found += [(drop, Drawing(Draws(ring, block.dim), always=True)) for drop in block.dropouts]
    # The sequence is cut before the first block and put together after the last: nothing else has to know of it.
    if block is blocks[0]:
        found.append((block.module, Around(come=partial(part, ring=ring, dim=block.dim))))
    if block is blocks[-1]:
        found.append((block.module, Around(go=partial(rejoin, ring=ring, dim=block.dim))))
    return found


def _below(name: str, parent: str) -> bool:
    return not parent or name == parent or name.startswith(f"{parent}.")

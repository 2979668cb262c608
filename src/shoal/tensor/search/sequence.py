"""Which blocks can keep their data in slices of the sequence: known ones that follow each other directly."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from shoal.tensor.cut import Cut, SequenceBlock
from shoal.tensor.search.families import BLOCKS
from shoal.tensor.search.trial_pass import CallSpan, Trace


def find_blocks(
    model: nn.Module, trace: Trace, cuts: tuple[Cut, ...]
) -> tuple[tuple[SequenceBlock, ...], int, str]:
    """The run of blocks, the length of the sequence in the trial pass, and if there is no such run, why."""
    found = [
        (trace.spans[name][0], name, module)
        for name, module in model.named_modules()
        if type(module).__name__ in BLOCKS and len(trace.spans.get(name, ())) == 1
    ]
    found.sort(key=lambda item: item[0].begin)
    if not found:
        return (
            (),
            0,
            f"it knows blocks of the kinds {', '.join(BLOCKS)} that run once, and this model has none",
        )
    blocks = []
    for _, name, module in found:
        reason = _uncut(name, module, cuts)
        if reason is not None:
            return (), 0, reason
        blocks.append(_block(name, module))
    for (span, name, _), (after, next_name, _) in pairwise(found):
        if not _follows(trace, span, after):
            return (), 0, f"the output of '{name}' goes elsewhere than into '{next_name}'"
    data = trace.tensors[found[0][0].inputs[0]]
    if data.ndim != 3:
        return (), 0, f"'{found[0][1]}' works on data of {data.ndim} dimensions and not of 3"
    return tuple(blocks), data.shape[blocks[0].dim], ""


def _block(name: str, module: nn.Module) -> SequenceBlock:
    shape = BLOCKS[type(module).__name__]
    first = True
    if isinstance(module, nn.TransformerEncoderLayer):
        first = module.self_attn.batch_first
    return SequenceBlock(
        name,
        f"{name}.{shape.attention}",
        tuple(f"{name}.{norm}" for norm in shape.norms),
        tuple(f"{name}.{drop}" for drop in shape.dropouts),
        1 if first else 0,
    )


def _uncut(name: str, module: nn.Module, cuts: tuple[Cut, ...]) -> str | None:
    """Why a block cannot take part: its attention and one pair must be cut, and nothing else in it has weights."""
    attention = f"{name}.{BLOCKS[type(module).__name__].attention}"
    inside = [cut for cut in cuts if cut.module.startswith(f"{name}.")]
    if not any(cut.module == attention or cut.group == attention for cut in inside):
        return f"'{attention}' is not cut"
    rest = [cut for cut in inside if cut.module != attention and cut.group != attention]
    if not any(cut.how == "row" for cut in rest):
        return f"'{name}' has no pair of projections that is cut"
    if any(cut.group == "tensor_rules" for cut in inside):
        return f"tensor_rules cuts a part of '{name}'"
    held = {cut.module for cut in inside} | {f"{name}.{norm}" for norm in BLOCKS[type(module).__name__].norms}
    for own, below in module.named_modules(prefix=name):
        within = any(own == one or own.startswith(f"{one}.") for one in held)
        if not within and any(True for _ in below.parameters(recurse=False)):
            return f"'{own}' in '{name}' is not known"
    return None


def _follows(trace: Trace, span: CallSpan, after: CallSpan) -> bool:
    output = span.outputs[0]
    # If anything else reads the output, it would get a slice where it expects all positions.
    used = all(after.begin <= number < after.end for number in trace.uses[output])
    return used and output in after.inputs and output not in trace.returned

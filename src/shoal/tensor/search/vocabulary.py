"""Embeddings and heads: tables with a row for each word of a vocabulary, cut by words."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from shoal.tensor.projection import is_projection, out_dim, outputs, weight_of
from shoal.tensor.search.trial_pass import Trace, storage_of


def find_vocabulary(
    model: nn.Module, trace: Trace, degree: int, refuse: Callable[[str], str | None]
) -> tuple[dict[str, str], dict[str, str]]:
    """Embeddings and heads to cut, each with the reason, and embeddings to leave whole, with the reason.

    An embedding is a vocabulary if a projection has the same weight, or if its rows are looked up by what comes from
    outside (words) and not by numbers that the model makes (positions), and there are more of them than columns, or a
    head has as many outputs. A head is a projection whose outputs go into no further layer.
    """
    modules = dict(model.named_modules())
    projections = {
        name: module
        for name, module in modules.items()
        if is_projection(module) and out_dim(module) == 0 and refuse(name) is None
    }
    ends = {name for name in projections if _ends(trace, name)}
    found: dict[str, str] = {}
    whole: dict[str, str] = {}
    for name, module in modules.items():
        if not isinstance(module, nn.Embedding):
            continue
        rows = module.num_embeddings
        # By identity of the tensor: tied weights are one parameter under two names.
        tied = [other for other, linear in projections.items() if weight_of(linear) is module.weight]
        like = [other for other in ends if outputs(projections[other]) == rows and other not in tied]
        reason = refuse(name) or unfit(module, degree)
        words = _from_outside(model, trace, name) and (rows > module.embedding_dim or bool(like))
        if reason is None and not tied and not words:
            reason = "its rows are no vocabulary"
        if reason is not None:
            whole[name] = reason
            continue
        found[name] = f"a vocabulary of {rows}"
        found.update(dict.fromkeys(tied, f"the head over the vocabulary of '{name}', one weight with it"))
        found.update(dict.fromkeys(like, f"the head over the vocabulary of '{name}'"))
    return found, whole


def _ends(trace: Trace, name: str) -> bool:
    """Does what comes out of a layer go into no other layer?"""
    queue = [tensor for call in trace.calls(name) for tensor in call.outputs]
    seen = set(queue)
    while queue:
        for number in trace.uses[queue.pop()]:
            event = trace.events[number]
            if event.module is not None:
                return False
            fresh = set(event.outputs) - seen
            seen |= fresh
            queue += fresh
    return True


def unfit(module: nn.Embedding, degree: int) -> str | None:
    """Why an embedding cannot be cut by words, or None.

    >>> unfit(nn.Embedding(3, 2), degree=4)
    '3 rows are too few for 4 workers'
    """
    rows = module.num_embeddings
    if -(-rows // degree) * (degree - 1) >= rows:
        return f"{rows} rows are too few for {degree} workers"
    # It renormalises rows in place on each look-up; ranks with a part of the words would not agree.
    if module.max_norm is not None:
        return "max_norm changes its rows as they are read"
    if module.sparse or module.scale_grad_by_freq:
        return "its gradient is sparse or scaled by frequency"
    return None


def _from_outside(model: nn.Module, trace: Trace, name: str) -> bool:
    """Are the rows looked up by data that the model was given?"""
    own = {storage_of(buffer) for buffer in model.buffers()}
    indices = [storage_of(trace.tensors[call.inputs[0]]) for call in trace.calls(name)]
    return all(index not in own and index not in trace.made for index in indices)

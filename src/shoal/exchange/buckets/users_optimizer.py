"""The optimizer as the user's function makes it, and which parameters it put into each group."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn, optim

from shoal.exchange.local_tensor import is_cut
from shoal.exchange.setup import Setup
from shoal.optimizer import (
    make_optimizer,
    names_in_groups,
    refuse_sparse,
    refuse_unless_by_parameter,
    refuse_unless_elementwise,
)


def users_optimizer(
    setup: Setup, learning: Mapping[str, nn.Parameter], who: str, slices: bool
) -> tuple[optim.Optimizer, list[list[str]]]:
    """Refuses one that would compute something else from what a worker has: slices, or the layers of a stage."""
    stands_for = {setup.same.get(name, name): p for name, p in learning.items()}
    given = {**setup.elsewhere, **stands_for}
    made = make_optimizer(setup.make_optimizer, given)
    refuse_sparse(made, who)
    if slices:
        refuse_unless_elementwise(made, who)
    elif any(is_cut(p) for p in learning.values()):
        refuse_unless_elementwise(made, "tensor parallelism", "leave tpN out")
    if setup.elsewhere:
        refuse_unless_by_parameter(made)
    return made, names_in_groups(made, learning, setup.model, list(setup.elsewhere.values()))

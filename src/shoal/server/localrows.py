"""A table of rows in the process that uses it: what the servers do, with nobody else there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shoal.server.machine import Operation
from shoal.server.rows import Rows, Terms, pack, unpack


class LocalRows:
    """The whole of one table, as a source of rows and a place for their gradients.

    >>> optimizer = {"kind": "SGD", "groups": [{"lr": 1.0}]}
    >>> rows = LocalRows(Terms("words", 1000, 2, "float32", seed=0, std=0.0, optimizer=optimizer))
    >>> rows.update(0, torch.tensor([7]), torch.ones(1, 2))
    >>> rows.fetch("words", torch.tensor([6, 7])).tolist()
    [[0.0, 0.0], [-1.0, -1.0]]
    """

    def __init__(self, terms: Terms, start: int = 0) -> None:
        """`start` is the first step to come."""
        self.terms = terms
        self.machine = Rows()
        self.machine.begin(terms, start)

    def fetch(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The rows, [n, dim], for these ids, unique or not."""
        assert name == self.terms.name, f"{name} was asked of {self.terms.name}"
        answer = self.machine.answer(Operation("rows", tensor=ids))
        assert answer is not None
        assert answer.tensor is not None
        return answer.tensor.view(len(ids), self.terms.dim)

    def stage(self, step: int, ids: torch.Tensor, gradient: torch.Tensor, part: int = 0) -> None:
        """Keep the gradient of rows, ids unique, for the update of its step."""
        self.machine.apply(Operation("stage", step, {"part": part}, pack(ids, gradient)))

    def apply(
        self,
        step: int,
        factor: float = 1.0,
        limit: float | None = None,
        settings: dict[str, Any] | None = None,
        parts: Sequence[int] = (0,),
    ) -> None:
        """The update of a step with what is staged: gradient × factor, clamped to ±limit."""
        args: dict[str, Any] = {"parts": [[part, 1] for part in parts], "factor": factor, "limit": limit}
        if settings is not None:
            args["settings"] = [settings]
        self.machine.apply(Operation("apply", step, {**args, "floor": step + 1}))

    def update(self, step: int, ids: torch.Tensor, gradient: torch.Tensor) -> None:
        """Stage and apply at once."""
        self.stage(step, ids, gradient)
        self.apply(step)

    def drop(self, step: int) -> None:
        """Forget what is staged for a step, instead of its update."""
        self.machine.apply(Operation("drop", step, {"parts": [0], "floor": step + 1}))

    def gradient(self, step: int, parts: Sequence[int] = (0,)) -> tuple[torch.Tensor, torch.Tensor]:
        """What is staged for a step: ids in ascending order, and a row for each."""
        found = self.machine.answer(Operation("gradient", step, {"parts": list(parts)}))
        assert found is not None
        dtype = getattr(torch, self.terms.dtype)
        return unpack(found.tensor, self.terms.dim, dtype)

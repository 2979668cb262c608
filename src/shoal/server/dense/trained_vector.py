"""A flat vector of values, the pieces of parameters in it, and the optimizer that changes them.

Pieces are views of the one vector, as in the exchanges that cut parameters, and the optimizer is made and run by the
same functions: the numbers that come out are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import optim

from shoal.optimizer import step_scaled
from shoal.server.protocol.dense_messages import StateEntry
from shoal.server.protocol.joined_tensors import name_of
from shoal.server.protocol.optimizer_description import (
    OptimizerDescription,
    Settings,
    as_setting,
    check_settings,
    optimizer_from,
)
from shoal.server.protocol.state_machine import Refused

_HOW = ("fused", "foreach")
"""Settings that say how the same numbers are computed: a worker's may differ."""


@dataclass(frozen=True, slots=True)
class VectorPiece:
    """Elements of the vector that are one parameter's, or a part of it."""

    start: int
    numel: int
    group: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of the optimizer's state, for those pieces that have it."""

    key: str
    pieces: list[int]
    each: bool
    """True: one number an element. False: one a piece, such as Adam's count of steps."""
    dtype: torch.dtype
    tensor: torch.Tensor
    """As long as the values, zero where no piece has it; or one number for each of `pieces`."""

    def plain(self) -> StateEntry:
        """What the operation `state` takes, but for a tensor with one number an element."""
        values = None if self.each else self.tensor.tolist()
        return {
            "key": self.key,
            "each": self.each,
            "pieces": self.pieces,
            "values": values,
            "dtype": name_of(self.dtype),
        }


class Trained:
    """Values and their optimizer."""

    def __init__(
        self, values: torch.Tensor, pieces: Sequence[VectorPiece], description: OptimizerDescription
    ) -> None:
        self.values = values
        self.pieces = list(pieces)
        self.description = description
        # Views: the optimizer changes the values where they lie, in memory that workers of this host read.
        self.tensors = [values[piece.start : piece.start + piece.numel] for piece in pieces]
        groups: list[list[torch.Tensor]] = [[] for _ in description["groups"]]
        for index, (piece, tensor) in enumerate(zip(self.pieces, self.tensors, strict=True)):
            if piece.group not in range(len(groups)):
                raise Refused(
                    f"piece {index} is of group {piece.group}, and the optimizer has {len(groups)} groups."
                )
            groups[piece.group].append(tensor)
        self.optimizer = optimizer_from(description, groups)
        self._kept = self._find_kept()
        self._complete = True

    def _find_kept(self) -> list[dict[str, torch.Tensor]]:
        """What the optimizer keeps for each tensor of a group, seen on tensors of one element."""
        # By a trial step, because the keys depend on settings such as momentum and amsgrad.
        probes = [torch.zeros(1, dtype=self.values.dtype) for _ in self.optimizer.param_groups]
        trial = optimizer_from(self.description, [[probe] for probe in probes])
        for probe in probes:
            probe.grad = torch.zeros_like(probe)
        trial.step()
        return [dict(trial.state[probe]) for probe in probes]

    # Settings.

    def check(self, settings: Sequence[Mapping[str, object]] | None) -> None:
        """Raise Refused if groups cannot take these settings. Nothing changes."""
        if settings is None:
            return
        groups = self.description["groups"]
        if len(settings) != len(groups):
            raise Refused(f"settings for {len(settings)} groups came, and the optimizer has {len(groups)}.")
        for index, (new, described) in enumerate(zip(settings, groups, strict=True)):
            whose = f"{self.description['kind']}, group {index}"
            check_settings(new, set(self.optimizer.defaults), whose)
            for key, value in new.items():
                old = described.get(key, self.optimizer.defaults[key])
                if key in _HOW:
                    continue
                # A flag that changes in the middle (amsgrad, nesterov) would need state that is not there.
                if _form(value) != _form(old) or (_is_flag(value) and value != old):
                    raise Refused(f"{whose}: {key} went from {old} to {value}; in a run only numbers change.")
                if key == "momentum" and bool(value) != bool(old):
                    raise Refused(
                        f"{whose}: momentum went from {old} to {value}, and there is no state for it; it is kept from "
                        "the first step on, or never."
                    )

    def settings(self) -> list[Settings]:
        """The numbers of each group as they are now, as plain values."""
        numbers = [
            {key: group[key] for key in self.optimizer.defaults if not _is_flag(group[key])}
            for group in self.optimizer.param_groups
        ]
        return [
            {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
            for group in numbers
        ]

    def set(self, settings: Sequence[Mapping[str, object]] | None) -> None:
        """Take over settings that have been checked."""
        for group, new in zip(self.optimizer.param_groups, settings or (), strict=settings is not None):
            group.update({key: as_setting(value) for key, value in new.items() if not _is_flag(value)})

    # The update.

    def step(
        self,
        gradient: torch.Tensor,
        used: Sequence[int] | None,
        factor: float,
        limit: float | None,
        share: float,
    ) -> None:
        """One step on gradient × factor, clamped to ±limit, of the pieces used, with `share` of the learning rate."""
        for index in range(len(self.pieces)) if used is None else used:
            piece = self.pieces[index]
            self.tensors[index].grad = gradient[piece.start : piece.start + piece.numel]
        groups = self.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        try:
            for group, rate in zip(groups, rates, strict=True):
                # Under ssp and asp each part is an update of its own, with its share of the rate: the shares of a step
                # make up one.
                group["lr"] = rate * share
            step_scaled(self.optimizer, lambda: [gradient], factor, limit)
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            for tensor in self.tensors:
                tensor.grad = None

    # State.

    def state_keys(self) -> dict[str, bool]:
        """The keys of the state, each with whether it has a number for each element."""
        found: dict[str, bool] = {}
        for tensor in self.tensors:
            for key, value in self.optimizer.state.get(tensor, {}).items():
                if isinstance(value, torch.Tensor):
                    found.setdefault(key, value.dim() > 0)
        return found

    def read(self, key: str) -> Entry:
        """One key of the state, for all pieces that have it."""
        state = self.optimizer.state
        pieces = [
            i for i, t in enumerate(self.tensors) if isinstance(state.get(t, {}).get(key), torch.Tensor)
        ]
        if not pieces:
            raise Refused(
                f"no piece has optimizer state '{key}'; there is {', '.join(self.state_keys()) or 'none'}."
            )
        found = [state[self.tensors[index]][key] for index in pieces]
        each = found[0].dim() > 0
        dtype = found[0].dtype
        if not each:
            return Entry(key, pieces, each, dtype, torch.stack(found))
        whole = torch.zeros(self.values.numel(), dtype=dtype)
        for index, value in zip(pieces, found, strict=True):
            piece = self.pieces[index]
            whole[piece.start : piece.start + piece.numel].copy_(value)
        return Entry(key, pieces, each, dtype, whole)

    def takes(self, entry: Entry) -> bool:
        """False if the optimizer keeps no such key for these pieces; Refused if it keeps it in another form."""
        for index in entry.pieces:
            kept = self._kept[self.pieces[index].group].get(entry.key)
            if kept is None:
                return False
            if (kept.dim() > 0) != entry.each:
                form = "one number an element" if kept.dim() else "one number a piece"
                raise Refused(f"{self.description['kind']} keeps {form} as '{entry.key}'; give it so.")
        return True

    def write(self, entry: Entry) -> None:
        """Take over what `takes` has agreed to."""
        for at, index in enumerate(entry.pieces):
            piece = self.pieces[index]
            mine = entry.tensor[piece.start : piece.start + piece.numel] if entry.each else entry.tensor[at]
            kept = self._kept[piece.group][entry.key]
            self.optimizer.state[self.tensors[index]][entry.key] = mine.to(kept.dtype, copy=True)
        self._complete = False

    def check_state(self) -> None:
        """Raise Refused if some of a piece's state is there and some is not, so that no step can be made."""
        if self._complete or isinstance(
            self.optimizer, optim.SGD
        ):  # SGD begins its one entry when it is missing
            return
        for index, (piece, tensor) in enumerate(zip(self.pieces, self.tensors, strict=True)):
            have = self.optimizer.state.get(tensor, {})
            missing = set(self._kept[piece.group]) - set(have)
            if have and missing:
                raise Refused(
                    f"piece {index} has {', '.join(sorted(have))} of {self.description['kind']}'s state and lacks "
                    f"{', '.join(sorted(missing))}; load all of it."
                )
        self._complete = True


def _form(value: object) -> int:
    """Flags, numbers and lists of so many numbers are not to be confused."""
    return -2 if _is_flag(value) else len(value) if isinstance(value, list | tuple) else -1


def _is_flag(value: object) -> bool:
    return value is None or isinstance(value, bool)

"""What modules inside of a student and a teacher give: captured as they run, compared sample by sample.

Hidden states are compared number by number, so the two have one shape. Attention is compared as a map of where a layer
looks, so widths may differ: the attention weights that a module returns, or where its activations are large.

Romero et al., "FitNets: Hints for thin deep nets", ICLR 2015; Zagoruyko and Komodakis, "Paying more attention to
attention", ICLR 2017.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.table import did_you_mean


def pairs_in(option: str, text: str) -> list[tuple[str, str]]:
    """Modules of a student and a teacher.

    >>> pairs_in("hidden", "layers.0:layers.1/layers.1:layers.3")
    [('layers.0', 'layers.1'), ('layers.1', 'layers.3')]
    """
    found = []
    for pair in filter(None, text.split("/")):
        mine, colon, theirs = pair.partition(":")
        if not colon or not mine or not theirs:
            raise ConfigError(
                f"distil: {option}={text}; write pairs of modules, student's and teacher's, as "
                f"{option}=layers.0:layers.1/layers.1:layers.3."
            )
        found.append((mine, theirs))
    return found


class Capture:
    """Keeps what some modules have given last."""

    def __init__(self, model: nn.Module, names: list[str], whose: str) -> None:
        self._given: dict[str, object] = {}
        modules = dict(model.named_modules())
        for name in names:
            if name not in modules:
                raise ConfigError(f"distil: {whose} has no module '{name}'{did_you_mean(name, modules)}")
            modules[name].register_forward_hook(partial(self._keep, name))

    def _keep(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        del module, inputs
        self._given[name] = output

    def take(self, name: str, whose: str) -> list[torch.Tensor]:
        """The tensors that a module gave in the last forward pass."""
        output = self._given.get(name)
        parts = output if isinstance(output, tuple | list) else [output]
        found = [part for part in parts if isinstance(part, torch.Tensor)]
        if not found:
            raise ConfigError(
                f"distil: module '{name}' of {whose} gave no tensor in this pass; name one that runs in forward."
            )
        return found

    def clear(self) -> None:
        """Let go of all of it."""
        self._given.clear()


def hidden_distances(
    pairs: list[tuple[str, str]], student: Capture, teacher: Capture
) -> Iterator[torch.Tensor]:
    """The mean squared difference of each pair, by sample."""
    for mine, theirs in pairs:
        own, wanted = student.take(mine, "the student")[0], teacher.take(theirs, "the teacher")[0]
        _check(own, mine)
        if own.shape != wanted.shape:
            raise ConfigError(
                f"distil: '{mine}' of the student gives {list(own.shape)} and '{theirs}' of the teacher "
                f"{list(wanted.shape)}; name modules of one width, or compare them as attention=."
            )
        yield (own - wanted.to(own.dtype)).pow(2).flatten(1).mean(1)


def attention_distances(
    pairs: list[tuple[str, str]], student: Capture, teacher: Capture
) -> Iterator[torch.Tensor]:
    """The squared distance of two maps, each of length one, by sample."""
    for mine, theirs in pairs:
        own = attention_map(student.take(mine, "the student"))
        wanted = attention_map(teacher.take(theirs, "the teacher"))
        _check(own, mine)
        if own.shape != wanted.shape:
            raise ConfigError(
                f"distil: '{mine}' of the student looks at {own.shape[1]} places and '{theirs}' of the teacher at "
                f"{wanted.shape[1]}; name layers that see the same."
            )
        yield (own - wanted.to(own.dtype)).pow(2).sum(1)


def attention_map(given: list[torch.Tensor]) -> torch.Tensor:
    """Where a layer looks, as one vector of length 1 for each sample.

    A module's second tensor of four dimensions is attention weights, samples × heads × places × places; else the
    squares of its first are summed over channels: the second dimension of images, the last of sequences.
    """
    if len(given) > 1 and given[1].dim() == 4:
        found = given[1].mean(1)
    else:
        channels = 1 if given[0].dim() == 4 else -1
        found = given[0].pow(2).sum(channels) if given[0].dim() > 2 else given[0].pow(2)
    return torch.nn.functional.normalize(found.flatten(1), dim=1)


def _check(own: torch.Tensor, name: str) -> None:
    if not own.requires_grad:
        raise ConfigError(
            f"distil: what '{name}' of the student gives has no gradient, as inside of a block that recompute= runs "
            "again; name the block itself, or leave recompute out."
        )

"""Begin with weights from elsewhere: `start("runs/first")`, `start("bert/", drop="encoder.")`.

From a checkpoint of Shoal, a folder of such, a safetensors file, a file of torch.save, or a folder of Hugging Face or
torch.distributed.checkpoint, by the names of tensors. What matched, what did not and what was reshaped is said once.
What the source does not have keeps its first values: a new head is a layer of another name, or of another size.

The weights are read on every worker before the model is cut, so any strategy begins with the same. A run that has a
checkpoint of its own goes on from that.

When to use: fine-tuning, or further training of a model from another program.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from shoal.checkpoint.convert.export import state_dict
from shoal.checkpoint.convert.foreign_files import open_source
from shoal.checkpoint.convert.understand import understand
from shoal.checkpoint.folder import glance, in_order, open_folder
from shoal.checkpoint.layout.head import FILE as MANIFEST
from shoal.checkpoint.layout.tensor_stream import Leaf
from shoal.checkpoint.verify import verify
from shoal.errors import ConfigError
from shoal.recipe.contract import Preparation, Recipe

_NAMED = 4
"""So many names stand in a sentence."""


@dataclass(frozen=True)
class Start(Recipe):
    """Parameters and buffers begin with the values that a file or folder has for them, by name."""

    summary: ClassVar[str] = "begin with weights from a checkpoint, safetensors or a Hugging Face folder"
    needs_values: ClassVar[bool] = True
    path: str
    drop: str = ""
    """A beginning of names in the source that the model's names do not have."""
    add: str = ""
    """A beginning of names in the model that those of the source do not have."""

    def prepare(self, preparation: Preparation) -> None:
        """Read what fits, and say what did."""
        model = preparation.model
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        found = read_weights(Path(self.path))
        renamed = {self.add + name.removeprefix(self.drop): leaf for name, leaf in found.items()}
        report = fill(named, renamed)
        if not report.taken:
            known = ", ".join(list(renamed)[:_NAMED])
            raise ConfigError(
                f"start: nothing in {self.path} has the name and size of a parameter; it has {known}, and the model "
                f"{', '.join(list(named)[:_NAMED])}. drop= and add= change how names begin."
            )
        if preparation.together.rank == 0:
            print(f"shoal: start: {report.sentence(self.path, len(named))}", file=sys.stderr)


@dataclass
class StartReport:
    """What has come of the tensors of a source."""

    taken: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    """Those of another size, which keep their first values."""
    missing: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """Those that the model does not have."""

    def sentence(self, source: str, tensors: int) -> str:
        """All of it in one line."""
        parts = [f"{len(self.taken)} of {tensors} tensors are from {source}"]
        for what, names in (
            ("reshaped", self.reshaped),
            ("of another size, so new", self.other),
            ("not in it, so new", self.missing),
            ("only in it", self.left),
        ):
            if names:
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                parts.append(f"{what}: {', '.join(names[:_NAMED])}{more}")
        return "; ".join(parts) + "."


def fill(named: Mapping[str, torch.Tensor], found: Mapping[str, Leaf]) -> StartReport:
    """Copy what fits into tensors by name; as many numbers in another shape fit too.

    >>> target = {"w": torch.zeros(2, 1), "head": torch.zeros(3)}
    >>> given = {"w": torch.ones(2), "head": torch.ones(4), "x": torch.ones(1)}
    >>> report = fill(target, {name: Leaf.of(tensor) for name, tensor in given.items()})
    >>> report.taken, report.reshaped, report.other, report.left, target["w"].sum().item()
    (['w'], ['w'], ['head'], ['x'], 2.0)
    """
    report = StartReport(left=[name for name in found if name not in named])
    with torch.no_grad():
        for name, target in named.items():
            leaf = found.get(name)
            if leaf is None:
                report.missing.append(name)
            elif torch.Size(leaf.shape).numel() != target.numel():
                report.other.append(name)
            else:
                if tuple(leaf.shape) != tuple(target.shape):
                    report.reshaped.append(name)
                target.copy_(leaf.read().reshape(target.shape))
                report.taken.append(name)
    return report


def read_weights(path: Path) -> dict[str, Leaf]:
    """Parameters and buffers by name, whoever has written them; a tied one under each of its names."""
    own = path if (path / MANIFEST).exists() else None
    if own is None and path.is_dir():
        own = next((found.folder for found in in_order(glance(path))), None)
    if own is not None:
        entry = open_folder(own)
        problem = next(verify(entry), None)
        if problem is not None:
            raise ConfigError(f"start: {entry.folder} is damaged ({problem}); choose another checkpoint.")
        return state_dict(entry)
    try:
        content = understand(open_source(path))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise ConfigError(
            f"start: {path} cannot be read ({error}); give a checkpoint or safetensors."
        ) from None
    return {**content.model, **{other: content.model[first] for other, first in content.ties.items()}}

"""Writes down every step for `shoal verify`: loss, gradients and parameters by name, in safetensors files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.errors import ConfigError
from shoal.types import Promise


class Recorder:
    """Every rank calls it, because gathering is collective; rank 0 writes."""

    def __init__(self, folder: str, rank: int, stands_for: int, promise: Promise) -> None:
        """`stands_for`: how many micro-batches this run computes for each one that the script asks for."""
        self._folder = Path(folder)
        self._writes = rank == 0
        if self._writes:
            if (self._folder / "promise").exists():
                raise ConfigError(
                    "the script makes a second Run, and verify compares one: verify each in a script of its own."
                )
            (self._folder / "stands_for").write_text(str(stands_for))
            (self._folder / "promise").write_text(promise.name)

    facts: Callable[[], dict[str, object]] | None = None
    """What has been found out about the program so far: plain values."""

    def start(self, model: nn.Module) -> None:
        """Both runs begin with the same weights: the first leaves its own beside its folder, the second takes them."""
        file = self._folder.parent / "initial.safetensors"
        if not self._writes:
            return  # rank 0's values reach the others when ranks agree on the model
        if file.exists():
            load_model(model, load_file(file), str(file))
        else:
            save_file(model_tensors(model), file)

    def gradients(self, step: int, loss: float, summed: Mapping[str, torch.Tensor], mean: float) -> None:
        """The loss, and the mean gradient before clipping."""
        if self._writes:
            means = {n: (g * mean).cpu().contiguous() for n, g in summed.items()}
            save_file(means, self._file(step, "gradients"))
            (self._folder / f"{step}.loss.json").write_text(json.dumps(loss))

    def parameters(self, step: int, values: Mapping[str, torch.Tensor]) -> None:
        """The parameters after the update."""
        if self._writes:
            save_file({n: p.contiguous() for n, p in values.items()}, self._file(step, "parameters"))
            if self.facts is not None:
                (self._folder / "facts.json").write_text(json.dumps(self.facts()))

    def _file(self, step: int, kind: str) -> Path:
        return self._folder / f"{step}.{kind}.safetensors"


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by name, each tensor once: a tied weight is kept under its first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, int, torch.Size]] = set()
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue  # a module's own extra state is not ours to store
        key = (value.data_ptr(), int(value.storage_offset()), value.shape)
        if value.numel() and key in seen:
            continue
        seen.add(key)
        found[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
    return found


def load_model(model: nn.Module, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy a checkpoint's tensors into a model, or say which name does not fit."""
    wanted = {name: t.shape for name, t in model_tensors(model).items()}
    for name in sorted(wanted.keys() ^ tensors.keys()):
        where = "the model" if name in wanted else source
        raise ConfigError(f"'{name}' is only in {where}; the checkpoint {source} is of another model.")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ConfigError(
                f"'{name}' is {list(tensors[name].shape)} in {source} and {list(shape)} in the model; "
                "use another checkpoint folder for another model."
            )
    model.load_state_dict(dict(tensors), strict=False)

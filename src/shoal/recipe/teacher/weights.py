"""Weights from where a user keeps them: a checkpoint of ours, safetensors, torch.save, or a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from shoal.checkpoint import folder as folders
from shoal.checkpoint.convert.export import state_dict
from shoal.checkpoint.convert.foreign_files import open_source
from shoal.checkpoint.convert.understand import understand
from shoal.checkpoint.layout.head import FILE
from shoal.errors import ConfigError
from shoal.table import did_you_mean


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name; of a folder of checkpoints its latest."""
    place = Path(path)
    if place.is_dir() and ((place / FILE).exists() or folders.holds_any(place)):
        found = folders.open_folder(place) if (place / FILE).exists() else folders.look(place)[0]
        if found.manifest is None:
            raise ConfigError(f"{found.problem}; choose another checkpoint.")
        return {name: leaf.read() for name, leaf in state_dict(found).items()}
    try:
        content = understand(open_source(place))
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        raise ConfigError(f"weights of {path} cannot be read: {error}; nothing is unpickled.") from error
    whole = {name: leaf.read() for name, leaf in content.model.items()}
    return {**whole, **{name: whole[first] for name, first in content.ties.items()}}


def load_weights(module: nn.Module, path: str, who: str) -> None:
    """Give a module weights from a place; refuses what does not fit by name and shape."""
    weights, own = read_weights(path), module.state_dict()
    missing = [name for name in own if name not in weights]
    if missing:
        raise ConfigError(
            f"{who}: {path} has no '{missing[0]}', which the model has ({len(missing)} of {len(own)} are missing)"
            f"{did_you_mean(missing[0], weights)}"
        )
    odd = next((name for name, tensor in own.items() if tensor.shape != weights[name].shape), None)
    if odd is not None:
        raise ConfigError(
            f"{who}: '{odd}' has shape {list(weights[odd].shape)} in {path} and {list(own[odd].shape)} in the model; "
            "give the module that these weights are of."
        )
    module.load_state_dict({name: weights[name] for name in own})

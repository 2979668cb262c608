"""What is to be exported, as `shoal export` tells the script's Run."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from shoal.errors import ConfigError
from shoal.train.model.make import MakeModel

QUANTISE = ("", "int8")


@dataclass(frozen=True)
class ExportRequest:
    """As the command line has it."""

    quantise: str = ""
    onnx: str = ""
    """The file to write; the one in whole numbers gets `.int8` before its suffix. Empty: none."""
    weights: str = "export"
    """Which weights: "export" (what recipes make of them), "ema" or "swa"."""

    def __post_init__(self) -> None:
        if self.quantise not in QUANTISE:
            raise ConfigError(f"--quantise {self.quantise}: it is int8.")
        if not (self.quantise or self.onnx):
            raise ConfigError("shoal export: say what to make, as --quantise int8 or --onnx model.onnx.")

    def dumps(self) -> str:
        """For an environment variable."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> ExportRequest | None:
        """From there; None where nothing is to be exported.

        >>> ExportRequest.of(ExportRequest(quantise="int8").dumps())
        ExportRequest(quantise='int8', onnx='', weights='export')
        """
        return ExportRequest(**json.loads(text)) if text else None

    @property
    def int8_onnx(self) -> Path:
        """Where the ONNX model in whole numbers goes."""
        place = Path(self.onnx)
        return place.with_name(f"{place.stem}.int8{place.suffix}")


def pristine(given: nn.Module | MakeModel) -> Callable[[], nn.Module]:
    """What makes the model as the script gives it, before recipes change it and a run takes hold of it."""
    if not isinstance(given, nn.Module):
        return given
    kept = copy.deepcopy(given)
    return lambda: copy.deepcopy(kept)


def plain_model(
    make: Callable[[], nn.Module], state: dict[str, torch.Tensor], like: torch.dtype
) -> nn.Module:
    """The model with its trained weights, and nothing else: in evaluation mode."""
    model = make().to(like)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        first = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise ConfigError(
            f"shoal export: the trained weights do not fit the script's model= as it is before training: {first} Let "
            "model= make the trained shape."
        ) from error
    return model.eval().requires_grad_(False)

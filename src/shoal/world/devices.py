"""Where a worker computes, and which backend of torch.distributed goes with that."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shoal.errors import ConfigError

ON_CARDS = "cpu:gloo,cuda:nccl"
"""Of any group on cards: a few numbers a step are agreed on from host memory."""


def fetch(values: Sequence[torch.Tensor]) -> list[float]:
    """Numbers that lie where they were computed, in one transfer: the host waits for a card once.

    >>> fetch([torch.tensor(0.5), torch.tensor(2)])
    [0.5, 2.0]
    """
    if len(values) < 2 or all(value.is_cpu for value in values):
        return [float(value) for value in values]
    found: list[float] = torch.stack([value.double() for value in values]).tolist()
    return found


def choose_device(name: str, local_rank: int) -> torch.device:
    """The device a worker computes on."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if name != "cuda" or not torch.cuda.is_available():
        raise ConfigError(
            f"device '{name}' is not to be had here; use device='auto', 'cpu' or, with cards, 'cuda'."
        )
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"worker {local_rank} of this host has no card: {torch.cuda.device_count()} found; "
            f"use --workers {torch.cuda.device_count()} or device='cpu'."
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def small_backend(device: torch.device) -> str:
    """The backend of a group that is cut from the workers of a job."""
    return ON_CARDS if device.type == "cuda" else "shoal"


def whole_backend(name: str, device: torch.device) -> str:
    """The backend of the group of all workers, from what `Run(backend=)` says."""
    if device.type == "cuda":
        if name not in ("auto", "nccl"):
            raise ConfigError(
                f"backend '{name}' is for memory of the host, and this run is on cards; use backend='auto'."
            )
        return ON_CARDS
    if name == "auto":
        return "shoal"
    if name == "nccl":
        raise ConfigError("backend 'nccl' needs cards, and this run is on the CPU; use backend='auto'.")
    if name not in ("shoal", "gloo"):
        raise ConfigError(f"unknown backend '{name}'; there are: auto, shoal, gloo, nccl.")
    return name

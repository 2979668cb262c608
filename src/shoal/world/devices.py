"""Where a worker computes, and which backend of torch.distributed goes with that."""

from __future__ import annotations

import torch

from shoal.errors import ConfigError


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
    return "nccl" if device.type == "cuda" else "shoal"


def whole_backend(name: str, device: torch.device) -> str:
    """The backend of the group of all workers, from what `Run(backend=)` says."""
    if name in ("auto", "nccl") and device.type == "cuda":
        return "cpu:gloo,cuda:nccl"  # a few numbers a step are agreed on from host memory
    if name == "auto":
        return "shoal"
    if name == "nccl":
        raise ConfigError("backend 'nccl' needs cards, and this run is on the CPU; use backend='auto'.")
    if name not in ("shoal", "gloo"):
        raise ConfigError(f"unknown backend '{name}'; there are: auto, shoal, gloo, nccl.")
    return name

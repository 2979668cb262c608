"""What torch and its users ask a process group besides collectives: names, devices, limits, profiler events.

A group in C++ asks the backend it wraps; a group written in Python is its own backend and answers itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.torch_private import backend_options, profiler_enabled, profiler_event, untraced


@untraced
class LocalGroup(ProcessGroup):
    """A group of one backend, for CPUs, written in Python."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, backend: str, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form for groups written in Python
        self._backend = backend
        self._rank = rank
        self._size = size
        self._name = self._description = ""

    def getBackendName(self) -> str:
        return self._backend

    # A group without inner backends has to remember its own name.

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, text: str) -> None:
        self._description = text

    def getGroupDesc(self) -> str:
        return self._description

    def name(self) -> str:
        return self._backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> LocalGroup:  # type: ignore[override]
        if device.type != "cpu":
            raise RuntimeError(
                f"No backend type associated with device type {device.type}; {self._backend} is for CPUs."
            )
        return self

    @property
    def options(self) -> object:
        return backend_options(self._backend)

    def set_timeout(self, timeout: timedelta) -> None:
        raise NotImplementedError

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.set_timeout(timeout)

    def _set_sequence_number_for_group(self) -> None:
        """The number starts at zero everywhere."""


NOT_PROFILED = contextlib.nullcontext()


def profiled(name: str, tensors: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    """An event in torch's profiler, if one is running, under the names that gloo uses and with the shapes of `tensors`.

    It begins and ends with the call, on its thread. One that lasted until the collective is done would end on another,
    perhaps when the profiler has been taken down already, which ends the process.
    """
    return profiler_event(f"shoal:{name}", tensors) if profiler_enabled() else NOT_PROFILED

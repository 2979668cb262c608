"""What a self-test ran on. No names of hosts, users or folders: the file is made to be given away."""

from __future__ import annotations

import os
import platform

import psutil
import torch
import torch.distributed as dist

import shoal


def describe_machine() -> dict[str, str]:
    """This host as one of its workers sees it.

    >>> describe_machine()["shoal"] == shoal.__version__
    True
    """
    found = {
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 1e9:.0f} GB",
        "cards": _cards(),
    }
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _cards() -> str:
    if not torch.cuda.is_available():
        return "none"
    names = [torch.cuda.get_device_name(card) for card in range(torch.cuda.device_count())]
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))

"""What ranks tell of the files they have written, and the manifest that follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

import shoal
from shoal.checkpoint.large_tensors import FileReport
from shoal.checkpoint.layout.manifest import FileFacts, Logical, Manifest, Slice
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.shard_file import DTYPES


class SaveFailed(Exception):
    """Some rank has not written its files, and why."""


@dataclass(frozen=True)
class Facts:
    """What a manifest says beside its tensors."""

    name: str
    step: int
    plan: str
    state: Mapping[str, Any]
    keep: str = ""
    """The retention that the checkpoint goes by; empty if somebody has asked for it by name."""


def manifest_of(facts: Facts, everyone: Sequence[list[FileReport] | str]) -> Manifest:
    """From what each rank says of its files; raises SaveFailed with what one says that has not written them."""
    files: dict[str, FileFacts] = {}
    tensors: dict[str, Logical] = {}
    for rank, theirs in enumerate(everyone):
        if isinstance(theirs, str):
            raise SaveFailed(theirs if len(everyone) == 1 else f"rank {rank}: {theirs}")
        for report in theirs:
            file = report["file"]
            files[file["name"]] = FileFacts(file["bytes"], file["head"])
            for path, dtype, shape, key, region, total in report["slices"]:
                piece = Slice(file["name"], key, Region.from_json(shape, region), total)
                before = tensors[path].slices if path in tensors else ()
                tensors[path] = Logical(DTYPES[dtype], tuple(shape), (*before, piece))
    return Manifest(
        name=facts.name,
        step=facts.step,
        written=datetime.now(UTC).isoformat(timespec="milliseconds"),
        plan=facts.plan,
        workers=len(everyone),
        tensors=dict(sorted(tensors.items())),
        files=files,
        state=facts.state,
        versions={"shoal": shoal.__version__, "torch": torch.__version__},
        keep=facts.keep,
    )

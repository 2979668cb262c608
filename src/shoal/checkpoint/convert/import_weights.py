"""Import: a checkpoint made of weights that somebody else has saved. A run goes on from it as from its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

import shoal
from shoal.checkpoint import folder as folders
from shoal.checkpoint.convert.foreign_files import open_source
from shoal.checkpoint.convert.understand import Content, understand
from shoal.checkpoint.layout.manifest import FILE, Logical, Manifest, Slice
from shoal.checkpoint.layout.region import Region
from shoal.checkpoint.layout.tensor_stream import Leaf, write_stream
from shoal.errors import ConfigError
from shoal.sealed import write_file

_FILE = "rank-0000.safetensors"


@dataclass(frozen=True)
class Imported:
    """What has come of an import."""

    folder: Path
    manifest: Manifest
    remarks: Sequence[str]


def import_checkpoint(
    source: Path, root: Path, name: str = "imported", step: int = 0, optimizer: str = ""
) -> Imported:
    """Make a checkpoint of a foreign file or folder, the latest of `root`. One tensor at a time is in memory."""
    folders.check_name(name)
    if (root / name).exists():
        raise ConfigError(f"{root / name} exists already; give the import another --name.")
    if step < 0:
        raise ConfigError(f"--step {step}: steps are counted from 0.")
    with _importing(source, root):
        content = understand(open_source(source), optimizer)
        manifest = _write(content.paths(), root, name, step, _state(content))
    return Imported(root / name, manifest, content.remarks)


def _state(content: Content) -> dict[str, object]:
    """What a run looks for beside tensors; where a foreign file says nothing, it begins afresh."""
    return {
        "optimizer": content.optimizer_name,
        "orders": [],
        "scale": None,
        "good_steps": 0,
        "count_per_sample": 1.0,
        "schedule": None,
        "cursor": None,
        "ties": content.ties,
    }


def _write(
    leaves: Mapping[str, Leaf], root: Path, name: str, step: int, state: Mapping[str, object]
) -> Manifest:
    written = folders.temporary(root, name, f"import-{os.getpid():x}")
    try:
        written.mkdir(parents=True)
        file = write_stream(written / _FILE, leaves)
        tensors = {
            path: Logical(
                leaf.dtype,
                leaf.shape,
                (Slice(_FILE, path, Region.whole(leaf.shape), file.checksums[path]),),
            )
            for path, leaf in sorted(leaves.items())
        }
        manifest = Manifest(
            name=name,
            step=step,
            written=datetime.now(UTC).isoformat(timespec="milliseconds"),
            plan="imported",
            workers=1,
            tensors=tensors,
            files={_FILE: file.facts},
            state=state,
            versions={"shoal": shoal.__version__, "torch": torch.__version__},
        )
        write_file(written / FILE, [manifest.dumps()])
        folders.commit(written, root / name)
    finally:
        shutil.rmtree(written, ignore_errors=True)
    return manifest


@contextmanager
def _importing(source: Path, root: Path) -> Iterator[None]:
    """Whatever a foreign file is made of, the answer is a sentence."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(
            f"{source} cannot be imported into {root}: {reason}; nothing has been written. "
            "Only tensors by name are taken over, as torch.save(model.state_dict()) or safetensors have them."
        ) from error

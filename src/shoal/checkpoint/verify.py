"""Is every byte of a checkpoint what was written? Names the tensor where it is not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from shoal.checkpoint.folder import CheckpointEntry, Unreadable, is_unreadable, problem_of
from shoal.checkpoint.layout.manifest import Manifest
from shoal.checkpoint.layout.shard_file import ShardFile


def verify(found: CheckpointEntry, files: Collection[str] | None = None) -> Iterator[str]:
    """What is wrong with a checkpoint, one sentence each; nothing if it is whole. `files`: only these.

    Raises `Unreadable` where that cannot be told.
    """
    if found.unreadable:
        raise Unreadable(found.problem)
    if found.manifest is None:
        yield found.problem
        return
    for name in found.manifest.files:
        if files is None or name in files:
            yield from _verify_file(found.folder, found.manifest, name)


def _verify_file(folder: Path, manifest: Manifest, name: str) -> Iterator[str]:
    facts = manifest.files[name]
    path = folder / name
    try:
        shard = ShardFile(path)
    except (OSError, ValueError) as error:
        if is_unreadable(error):
            raise Unreadable(problem_of(path, error)) from error
        yield f"{path}: {error.strerror if isinstance(error, OSError) else error}"
        return
    try:
        if shard.size != facts.bytes:
            yield f"{path} has {shard.size} bytes, and {facts.bytes} were written"
            return
        if shard.head_checksum() != facts.head:
            yield f"{path}: its header does not match its checksum"
            return
        slots = shard.header()
        seen = 0
        here = [(t, m, p) for t, m in manifest.tensors.items() for p in m.slices if p.file == name]
        # In the order of the file: so the disk can read ahead.
        here.sort(key=lambda entry: slots[entry[2].key].start if entry[2].key in slots else 0)
        for title, tensor, piece in here:
            slot = slots.get(piece.key)
            size = piece.region.numel * tensor.dtype.itemsize
            if slot is None or slot.dtype != tensor.dtype or slot.stop - slot.start != size:
                yield f"{path}: '{title}' is not what the manifest says"
                continue
            seen += size
            if shard.checksum(slot) != piece.checksum:
                yield f"{path}: '{title}' does not match its checksum"
        if seen != shard.size - shard.begin:
            yield f"{path} holds {shard.size - shard.begin} bytes of tensors, and the manifest knows of {seen}"
    except (ValueError, KeyError, TypeError) as error:
        yield f"{path}: its header cannot be read ({error})"
    finally:
        shard.close()

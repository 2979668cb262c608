"""Every byte of a store against its manifest."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from shoal.data.store.manifest import BLOCK, StoreFile, StoreManifest
from shoal.data.store.places.place import Place
from shoal.errors import ConfigError


def problems(place: Place, manifest: StoreManifest) -> Iterator[str]:
    """A sentence for each file that is not what it was: which bytes, or that it is gone."""
    for file in {file.name: file for file in manifest.files}.values():
        problem = problem_of(place, file)
        if problem:
            yield problem


def problem_of(place: Place, file: StoreFile) -> str:
    """What is wrong with a file; empty if nothing is."""
    whole = xxhash.xxh3_128()
    damaged = []
    size = 0
    try:
        for number, block in enumerate(place.blocks(file)):
            whole.update(block)
            size += len(block)
            if xxhash.xxh3_64_hexdigest(block) != file.blocks[16 * number : 16 * number + 16]:
                damaged.append(number)
    except FileNotFoundError:
        return f"{file.name} is missing"
    except (OSError, ConfigError) as error:
        return f"{file.name} cannot be read ({error})"
    if size != file.bytes:
        return f"{file.name} has {size} bytes and its manifest says {file.bytes}"
    if damaged:
        places = ", ".join(f"{n * BLOCK} to {min((n + 1) * BLOCK, size)}" for n in damaged[:3])
        return f"{file.name} is damaged in bytes {places}"
    return "" if whole.hexdigest() == file.digest else f"{file.name} does not match its checksum"

"""Upkeep of a store: what nobody needs any more goes, and copies elsewhere are whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from shoal.data.store.build import checksums, is_held
from shoal.data.store.manifest import StoreManifest, version_name
from shoal.data.store.places.place import DATA, Place
from shoal.data.store.verify import problem_of
from shoal.data.store.versions import read_manifest
from shoal.errors import ConfigError
from shoal.sealed import write_file

Tell = Callable[[int, int], None]
"""(bytes done, bytes in all)"""


def collect(place: Place, keep: int | None = None, dry: bool = False) -> tuple[list[int], dict[str, int]]:
    """Remove versions but the newest `keep`, and files that no version names. Which went, and how many bytes each had.

    Nothing goes while somebody builds: files of a build that is not finished have no version yet.
    """
    versions = place.versions()
    kept = versions if keep is None else versions[-max(keep, 1) :]
    busy = [stage for stage in place.stages() if is_held(stage)]
    if busy:
        raise ConfigError(f"{place.title} is being built by another process; collect when it is done.")
    named = {file.name for version in kept for file in read_manifest(place, version).files}
    gone = {name: size for name, size in place.data_files().items() if name not in named}
    old = [version for version in versions if version not in kept]
    if not dry:
        for version in old:  # first: then nothing names what goes next
            place.remove(version_name(version))
        for stage in place.stages():
            shutil.rmtree(stage, ignore_errors=True)
        for name in gone:
            place.remove(f"{DATA}/{name}")
    return old, gone


def copy_store(
    source: Place, target: Place, version: int | None = None, tell: Tell | None = None
) -> StoreManifest:
    """Copy a version elsewhere: every file is checked on its way, and the manifest goes last."""
    manifest = read_manifest(source, version)
    name = version_name(manifest.version)
    if manifest.version in target.versions():
        if target.read(name) == source.read(name):
            return manifest
        raise ConfigError(f"{target.title} has another version {manifest.version}; copy to another place.")
    there = target.data_files()
    stage = target.stage("copy")
    stage.mkdir(parents=True, exist_ok=True)
    done = 0
    try:
        for file in {file.name: file for file in manifest.files}.values():
            if there.get(file.name) != file.bytes:
                part = stage / file.name
                try:
                    write_file(part, source.blocks(file))
                    digest, _ = checksums(part)
                except FileNotFoundError:
                    digest = "nothing"
                if digest != file.digest:
                    problem = problem_of(source, file) or f"{file.name} was damaged on its way"
                    raise ConfigError(f"{source.title}: {problem}; nothing is copied further.")
                target.bring_in(part, file.name)
            done += file.bytes
            if tell is not None:
                tell(done, manifest.nbytes)
        target.create(name, source.read(name))
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return manifest

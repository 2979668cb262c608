"""Which versions a store has, and what their manifests say."""

from __future__ import annotations

from shoal.data.store.manifest import StoreManifest, version_name
from shoal.data.store.places.place import Place
from shoal.errors import ConfigError


def read_manifest(place: Place, version: int | None = None) -> StoreManifest:
    """The manifest of a version, by default of the newest; or a sentence why not.

    >>> from pathlib import Path
    >>> from shoal.data.store.places.place import LocalPlace
    >>> read_manifest(LocalPlace(Path("nowhere")))
    Traceback (most recent call last):
    shoal.errors.ConfigError: there is no store at nowhere; build one with shoal data build, or look at the address.
    """
    versions = place.versions()
    if not versions:
        raise ConfigError(
            f"there is no store at {place.title}; build one with shoal data build, or look at the address."
        )
    wanted = versions[-1] if version is None else version
    if wanted not in versions:
        raise ConfigError(
            f"{place.title} has no version {wanted}; there are {', '.join(map(str, versions))}."
        )
    name = version_name(wanted)
    try:
        return StoreManifest.loads(place.read(name))
    except (ValueError, OSError) as error:
        older = [one for one in versions if one != wanted]
        rest = f"; version={older[-1]} is another" if older else ""
        raise ConfigError(f"{place.title}/{name} cannot be used ({error}){rest}.") from error

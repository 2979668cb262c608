"""Slot: what goes on the wire. `none` sends gradients as they are."""

from __future__ import annotations

from shoal.compress.none import Uncompressed
from shoal.table import Table

TABLE: Table[type[Uncompressed]] = Table("compressor", {"none": Uncompressed})

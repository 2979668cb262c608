"""Slot: what goes on the wire. One file a choice; this table is the list of them."""

from __future__ import annotations

from shoal.compress.auto import Auto
from shoal.compress.base import Compressor
from shoal.compress.bf16 import Bf16
from shoal.compress.fp16 import Fp16
from shoal.compress.int4 import Int4
from shoal.compress.int8 import Int8
from shoal.compress.none import Uncompressed
from shoal.compress.powersgd import PowerSgd
from shoal.compress.randomk import RandomK
from shoal.compress.sign import Sign
from shoal.compress.topk import TopK
from shoal.config import fill_options
from shoal.table import Table
from shoal.types import Choice

TABLE: Table[type[Compressor]] = Table(
    "compressor",
    {
        "none": Uncompressed,
        "fp16": Fp16,
        "bf16": Bf16,
        "int8": Int8,
        "int4": Int4,
        "sign": Sign,
        "topk": TopK,
        "randomk": RandomK,
        "powersgd": PowerSgd,
        "auto": Auto,
    },
)


def make_compressor(choice: Choice) -> Compressor:
    """The compressor that a choice names, with its options.

    >>> make_compressor(Choice("topk", args=(0.05,)))
    TopK(ratio=0.05, feedback=True)
    """
    return fill_options(choice, TABLE.look_up(choice.name))

"""The reducer that a run needs."""

from __future__ import annotations

from shoal.compress.base import Compressor
from shoal.exchange.reduce.autotune import AutoTune
from shoal.exchange.reduce.compressed import Compressed
from shoal.exchange.reduce.reducer import Plain, Reducer
from shoal.world.world import World


def make_reducer(world: World, compressor: Compressor | None, model_world: World) -> Reducer:
    """How buckets are summed among these workers. Every one of them calls it.

    `model_world`: those who hold one model between them, and must decide alike.
    """
    if compressor is None or world.size == 1:
        return Plain(world)
    made = Compressed(world, compressor)
    return AutoTune(world, Plain(world), made, compressor, model_world) if compressor.tried else made

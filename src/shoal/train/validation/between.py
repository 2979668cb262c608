"""Without evaluators: the workers measure each automatic checkpoint themselves, between two steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing

from shoal.errors import ConfigError
from shoal.train.loop import Loop
from shoal.train.run_config import RunConfig
from shoal.train.step_context import StepContext
from shoal.types import StepReport
from shoal.world.launch import Launch


def validates_itself(config: RunConfig, context: StepContext, launch: Launch) -> bool:
    """Whether nobody else does. Every rank calls it and gets the same answer."""
    if config.validation is None or launch.role or launch.record:
        return False
    servers = context.exchange.uses_servers and context.world.size > 1
    told = float(launch.stages.evaluators)
    if (told if servers else context.world.gather_numbers([told]).max()) > 0:
        return False
    if servers:
        raise ConfigError(
            "validation= under ps: workers are not at the same step when a checkpoint is saved; start evaluators with "
            "shoal run --evaluators 1, or call run.evaluate at the end."
        )
    return True


def measured_steps(
    loop: Loop, steps: Iterator[StepReport], measure: Callable[[], object]
) -> Iterator[StepReport]:
    """The steps of a run; where one is saved, what was measured is in the log before the loop's body runs."""
    assert isinstance(steps, Generator)
    with closing(steps):
        for report in steps:
            if loop.at_checkpoint:
                measure()
            yield report

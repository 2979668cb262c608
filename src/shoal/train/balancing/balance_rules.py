"""Which balance a run has, and what one cannot be combined with, each in one sentence."""

from __future__ import annotations

from shoal import exchange, partition
from shoal.balance import make_balance
from shoal.balance.base import Balance
from shoal.balance.even import Even
from shoal.errors import ConfigError
from shoal.train.run_config import RunConfig
from shoal.types import Plan
from shoal.world.mesh import Mesh

GIVEN = "static(shares=2/1)"


def balance_of(config: RunConfig, recorded: bool = False) -> Balance:
    """The balance that was asked for. What two runs are compared by must not depend on how fast they are."""
    chosen = make_balance(config.balance)
    return Even() if recorded and chosen.measures else chosen


def check_balance(config: RunConfig, plan: Plan, mesh: Mesh, replicas: int) -> None:
    """Refuse a balance that has nothing to act on, or nothing to go by."""
    chosen = make_balance(config.balance)
    if not chosen.measures and not chosen.given:
        return
    how = exchange.TABLE.look_up(plan.exchange.name)
    what = f"balance={config.balance} under {plan}"
    if how.uses_servers:
        raise ConfigError(
            f"{what}: the servers hand out parts to whoever is free, which balances already; leave balance out."
        )
    if how.updates_alone:
        raise ConfigError(
            f"{what}: between meetings nobody waits for anybody, so nothing tells all workers of new shares; use "
            "balance=even, and partition=block(shares=2/1) for shares that stay."
        )
    if mesh.stages.size > 1:
        _check_stages(chosen, mesh, what)
        return
    if partition.make_partition(config.partition).shares:
        raise ConfigError(
            f"balance={config.balance} and partition={config.partition} both say how much each worker gets; keep one."
        )
    for name, numbers in (("shares", chosen.given), ("most", chosen.limits)):
        enough = len(numbers) in ((replicas, 0, 1) if name == "most" else (replicas, 0))
        if replicas > 1 and not enough:
            raise ConfigError(
                f"{what}: {name} has {len(numbers)} numbers for {replicas} replicas; give one for each."
            )
    if chosen.measures and (how.every_worker_computes or config.batchnorm == "sync"):
        cause = "batchnorm='sync'" if config.batchnorm == "sync" else plan.exchange.name
        raise ConfigError(
            f"{what}: with {cause} workers wait for each other within the model, so each takes as long as the slowest "
            f"and cannot be measured; give shares, as in {GIVEN}."
        )
    if chosen.measures and config.deterministic:
        raise ConfigError(
            f"{what}: with deterministic=True a run repeats itself, and measurements do not; give shares, as in "
            f"{GIVEN}."
        )


def _check_stages(chosen: Balance, mesh: Mesh, what: str) -> None:
    if not chosen.divides_stages:
        raise ConfigError(
            f"{what}: the stages of a pipeline stay what they are in a whole run; use balance=history, static, or "
            f"{GIVEN}."
        )
    if chosen.given and len(chosen.given) != mesh.stages.size:
        raise ConfigError(
            f"{what}: a pipeline of {mesh.stages.size} workers needs as many shares, and there are "
            f"{len(chosen.given)}; give one for each."
        )

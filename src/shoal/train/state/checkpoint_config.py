"""What the user asks for of checkpoints, and what of it cannot work."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.copies.keep import Keep
from shoal.checkpoint.save import FAILURES
from shoal.errors import ConfigError

PEER = "peer"


@dataclass(frozen=True)
class CheckpointConfig:
    """What the user asks for."""

    root: Path | None = None
    every: int | None = None
    """Steps between checkpoints."""
    keep: Keep = Keep()  # noqa: RUF009 it is frozen
    copies: tuple[str, ...] = ()
    """Where second copies go: "peer", or URLs."""
    failures: int = FAILURES
    """So many saves in a row that fail end the run."""

    @staticmethod
    def of(
        root: str | None, every: int | None, keep: int | str | None, copies: str, failures: int = FAILURES
    ) -> CheckpointConfig:
        """From the fields of a Run; refuses what cannot work."""
        if every is not None and every < 1:
            raise ConfigError(f"checkpoint_every={every}; it must be at least 1.")
        if failures < 1:
            raise ConfigError(f"checkpoint_failures={failures}; it must be at least 1.")
        listed = tuple(copy.strip() for copy in copies.split(",") if copy.strip())
        for what, given in ((f"checkpoint_every={every}", every), (f"copies={copies!r}", listed)):
            if given and root is None:
                raise ConfigError(f"{what} needs a folder: give checkpoint=.")
        for copy in listed:
            if copy != PEER and "://" not in copy:
                raise ConfigError(f"copies: '{copy}' is neither 'peer' nor a URL such as s3://bucket/run.")
        return CheckpointConfig(
            Path(root).expanduser().absolute() if root is not None else None,
            every,
            Keep.of(keep),
            listed,
            failures,
        )

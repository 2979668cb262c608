"""Everything Shoal raises on purpose.

ShoalError
├── ConfigError        the user asked for something that cannot work; exit code 2, one sentence, no traceback
├── NonFiniteLoss      the loss became NaN or infinite; exit code 2
├── ReplicasDiffer     replicas hold different numbers and none has a majority (`check_replicas=`); exit code 2
├── CallMismatch       ranks made different calls, such as run.evaluate on rank 0 only; exit code 2
├── PeerLost           another worker ended while this one waited for it; exit code 4
├── ServersLost        the parameter servers have ended or cannot be reached; exit code 4
├── ServerRefused      a parameter server cannot do what it was asked; exit code 2
├── VerifyFailed       a strategy does not compute what one process computes; exit code 1
├── SelftestFailed     a check of `shoal selftest` failed; exit code 1
├── ChaosFound         `shoal chaos` found that something was lost, differs or is left behind; exit code 1
├── FaultsFound        `shoal doctor` found what has to be repaired before training; exit code 1
└── WorkerFailed       the launcher saw a worker fail; carries that worker's own report; exit code of the worker

Each message is a sentence that says what happened, with the numbers, and what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass


class ShoalError(Exception):
    """Base of every error Shoal raises on purpose; `exit_code` is what the process ends with."""

    exit_code: int = 1

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback; `%tb` and `%debug` still know all of it."""
        return [f"shoal: {self}"]


class ConfigError(ShoalError):
    """A request that cannot work. Raised before training starts wherever that is possible."""

    exit_code = 2


class NonFiniteLoss(ShoalError):
    """The global loss is NaN or infinite and `on_nan="stop"`."""

    exit_code = 2


class ReplicasDiffer(ShoalError):
    """Replicas hold different numbers, and no majority tells which are right."""

    exit_code = 2


class CallMismatch(ShoalError):
    """Ranks have made different calls where all of them must make the same ones."""

    exit_code = 2


class PeerLost(ShoalError):
    """A worker that this one was waiting for has ended. It is a consequence, never the first cause."""

    exit_code = 4


class TornStep(ShoalError):
    """A worker was lost while some had applied a step and others had not: their states no longer fit together."""

    exit_code = 4


class ServersLost(ShoalError):
    """The parameter servers have ended, or cannot be reached."""

    exit_code = 4


class ServerRefused(ShoalError):
    """A parameter server cannot do what it was asked, and says why."""

    exit_code = 2


class VerifyFailed(ShoalError):
    """`shoal verify` found a difference, or nothing to compare."""


class SelftestFailed(ShoalError):
    """A check of `shoal selftest` failed, on the user's own machine."""


class FaultsFound(ShoalError):
    """`shoal doctor` found what has to be repaired before training."""


class ChaosFound(ShoalError):
    """`shoal chaos` found that something was lost, differs, or is left behind."""


class WorkerFailed(ShoalError):
    """A worker of a launched job failed."""

    def __init__(
        self, message: str, exit_code: int = 1, refusal: bool = False, loss: Loss | None = None
    ) -> None:
        """`refusal`: the worker raised an error of this file on purpose, and the message is its own sentence.

        `loss`: where another start of the workers may do better; None where it would end in the same way.
        """
        super().__init__(message)
        self.exit_code = exit_code
        self.refusal = refusal
        self.loss = loss


@dataclass(frozen=True)
class Loss:
    """A worker that was lost by no fault of the program's, as far as anybody can tell."""

    sentence: str
    """Who, how and where, without what to do about it."""
    rank: int
    cause: str
    """As "SIGKILL", "a hang" or "ConnectionResetError"."""
    place: str = ""
    """As "step 7, loading data"."""
    step: int = 0
    """The step that it had begun last; 0 before the first."""
    begun: bool = True
    """Whether it had come to its `Run`."""
    pid: int = 0
    phase: str = ""
    log: str = ""
    """Where the run keeps its event logs."""
    plan: str = ""
    """The strategy, as the run has understood it."""
    samples: str = ""
    """The numbers of its samples in that step, where it is known that it was lost there before."""

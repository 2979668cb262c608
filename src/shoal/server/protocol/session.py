"""The outcome of an operation: done, or refused in a sentence, alike on all copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.server.protocol.messages import Message
from shoal.server.protocol.state_machine import Answer, Operation, Refused

OK, REFUSED = 0, 1
MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError)
"""Errors of a machine that was sent malformed arguments. All copies raise the same."""


def attempt(do: Callable[[Operation], Answer | None], message: Message) -> tuple[int, Answer | None]:
    """Have a machine apply an operation or answer it, and return the outcome."""
    name, args = message.meta
    try:
        return OK, do(Operation(name, message.clock, args, message.tensor, message.client, message.codec))
    except Refused as reason:
        return REFUSED, Answer(str(reason))
    except MALFORMED as error:
        return REFUSED, Answer(f"{name} with wrong arguments: {error!r}")


@dataclass
class Session:
    """The last call of one client."""

    seq: int
    place: int
    status: int
    value: object

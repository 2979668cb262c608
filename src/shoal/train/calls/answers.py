"""What calls of a Run between its loops have answered, so that a script that runs again from its top gets it again.

After a loss the script makes the calls of the loops that are behind it once more: an evaluation after the first epoch,
say. The model is further by then, so they are answered from what stood in the snapshot, and nothing is measured, moved
or written a second time. Calls in a loop's body need no answers: the loop goes on after them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MOST = 10_000
"""Answers that are kept; a script that asks more often between its loops computes the rest again."""


@dataclass
class Answers:
    """Those of one Run.

    >>> first = Answers()
    >>> first.note("run.evaluate", [0.5])
    >>> again = Answers(given=first.state())
    >>> again.known("run.evaluate"), again.known("run.evaluate")
    ([0.5], None)
    """

    made: list[list[object]] = field(default_factory=list)
    """Each call and its answer, as plain values, in order."""
    given: list[list[object]] = field(default_factory=list)
    """Those of the start before, which the script has not asked for yet."""
    replays: bool = False
    """Whether the script is on its way to where the snapshot was taken."""
    inside: bool = False
    """Whether the body of a loop runs."""

    def note(self, what: str, answer: object) -> None:
        """Every rank has made this call, and this was its answer."""
        if not self.inside and len(self.made) < MOST:
            self.made.append([what, answer])

    def known(self, what: str) -> Any:
        """The answer to a call that was made before; None if it must be made."""
        if not self.given:
            return None
        said, answer = self.given.pop(0)
        if said != what:  # another way through the script: none of the rest fits
            self.given = []
            return None
        self.note(what, answer)
        return answer

    def enter_body(self) -> None:
        """A step is done, and the loop's body runs: from here on everything is new."""
        self.inside = True
        self.replays = False
        self.given = []

    def state(self) -> list[list[Any]]:
        """For a snapshot."""
        return [list(entry) for entry in self.made]

    def restore(self, state: object) -> None:
        """From a snapshot; what is none of ours is left out."""
        if isinstance(state, list) and all(
            isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str) for entry in state
        ):
            self.given = state
            self.replays = True

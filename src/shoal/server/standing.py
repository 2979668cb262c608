"""Where a server stands in the chain of a shard."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.server.view import View


@dataclass(frozen=True, slots=True)
class Standing:
    """One server, one shard, one view."""

    is_member: bool = False
    """Whether it is in the chain; if not, it is the newcomer."""
    is_head: bool = False
    is_tail: bool = False
    before: int | None = None
    """The server that it gets operations from."""
    next: int | None = None
    """The server that operations go to from there: after the tail, that is the newcomer."""

    @staticmethod
    def of(me: int, shard: int, view: View) -> Standing:
        """By the view.

        >>> view = View(1, ((7, 8),), newcomers=((9,),))
        >>> Standing.of(7, 0, view)
        Standing(is_member=True, is_head=True, is_tail=False, before=None, next=8)
        >>> Standing.of(8, 0, view)
        Standing(is_member=True, is_head=False, is_tail=True, before=7, next=9)
        >>> Standing.of(9, 0, view)
        Standing(is_member=False, is_head=False, is_tail=False, before=8, next=None)
        """
        line = (*view.chains[shard], *view.newcomers[shard][:1]) if view.newcomers else view.chains[shard]
        place, members = line.index(me), len(view.chains[shard])
        return Standing(
            place < members,
            place == 0,
            place == members - 1,
            line[place - 1] if place else None,
            line[place + 1] if place + 1 < len(line) else None,
        )

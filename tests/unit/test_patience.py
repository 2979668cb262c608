"""How long a worker may hang, and what follows from a hang that may only have been slow."""

from __future__ import annotations

import bdb
import pdb

from shoal.cluster.recovery.patience import Patience
from shoal.cluster.recovery.retries import Retries
from shoal.cluster.stacks import Stack
from shoal.cluster.stalls import HANG_SECONDS
from shoal.errors import Loss, WorkerFailed

HANG = Loss("worker 1 hangs", 1, "a hang", "step 7, forward and backward", 7)


def test_what_hangs_in_one_place_again_is_waited_for_longer_and_ends_the_run_at_last() -> None:
    patience, retries = Patience(None, kept=lambda: True), Retries(3)
    limits = []
    while True:
        limits.append(patience.limit(0.0))
        known = patience.knows(HANG)
        patience.after(HANG)
        verdict = retries.after(WorkerFailed("…", 4, loss=HANG), reached=7, known=known)
        if not verdict.again:
            break
    assert limits == [10.0, 40.0, 160.0, HANG_SECONDS]
    assert "lost there twice, by a hang" in verdict.why


def test_without_a_snapshot_or_with_a_limit_nothing_is_tried() -> None:
    assert Patience(None, kept=lambda: False).limit(0.0) == HANG_SECONDS
    assert Patience(None, kept=lambda: True).limit(77.0) == 77.0
    given = Patience(2.0, kept=lambda: True)
    given.after(HANG)
    assert given.limit(77.0) == 2.0
    assert given.knows(HANG)


def test_a_worker_at_a_prompt_is_no_worker_that_hangs() -> None:
    own = ("/home/me/train.py", 5, "loss")
    assert Stack(((pdb.__file__, 1, "interaction"), (bdb.__file__, 2, "dispatch_line"), own)).debugs
    assert not Stack((own,)).debugs

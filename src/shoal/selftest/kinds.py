"""The names of all kinds of check, known without torch."""

from __future__ import annotations

TOGETHER = ("collectives", "strategies", "memory", "checkpoints")
"""Made by workers that stay the same."""
LOST_WORKER = "lost worker"
"""Each of these starts workers of its own, and kills one."""
KINDS = (*TOGETHER, LOST_WORKER)

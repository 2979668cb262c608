"""`shoal submit`, `shoal jobs` and what else is said to a queue, on any engine."""

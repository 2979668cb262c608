"""`shoal chaos`: faults on purpose, from a seed, against the user's own script; and whether anything was lost."""

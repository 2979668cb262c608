"""`shoal sweep`: many runs of one script, each with settings of its own, as jobs of any engine."""

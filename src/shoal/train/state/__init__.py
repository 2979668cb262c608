"""A run's state: how far it is, what a checkpoint saves of it, and when."""

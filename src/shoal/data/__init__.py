"""Data: sources, the one global order of samples, and how workers are fed."""

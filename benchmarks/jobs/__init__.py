"""The queue of one host."""

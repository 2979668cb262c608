"""Foresight: what a model takes, measured or counted, and which plan follows from it."""

"""Checkpoints measured on `validation=`: by evaluators beside training, or by the workers between two steps."""

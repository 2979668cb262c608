"""Calls that every rank makes: compared, and ended in a sentence where they differ."""

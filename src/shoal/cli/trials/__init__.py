"""Verbs that try machines and runs before they count: `shoal doctor`, `shoal chaos`."""

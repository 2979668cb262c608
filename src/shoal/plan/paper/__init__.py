"""Machines on paper: cards and networks nobody here has, models as a few numbers, and runs that others published."""

"""Collectives over gloo, whose ranks compare their calls first; and the threads on which some of them go on."""

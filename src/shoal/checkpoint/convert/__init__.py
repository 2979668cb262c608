"""Checkpoints from and to other people's formats, without unpickling."""

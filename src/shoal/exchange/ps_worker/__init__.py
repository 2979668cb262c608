"""A worker's side of `ps`: options, claims of work, push, pull, and the host tier."""

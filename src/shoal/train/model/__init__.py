"""The user's model as this worker runs it: made, divided, normalised, with its random streams; and whole again."""

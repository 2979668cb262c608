"""A step of the user's own: several models, losses and optimizers, on the same exchanges."""

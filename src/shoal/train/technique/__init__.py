"""Training technique: the loss as a sum and a count, clipping, number formats, learning rates."""

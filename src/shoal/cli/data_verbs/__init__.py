"""`shoal data`: build stores, look at them, check, copy and clear them."""

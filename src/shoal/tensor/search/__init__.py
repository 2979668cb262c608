"""Finding what of a model can be cut: one trial pass, the user's rules, and a proof of what was asked for."""

"""Quantisation: rounding while a model trains, and the model in whole numbers afterwards."""

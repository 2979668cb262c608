"""Stores that are prepared part by part, by processes of their own or by training itself, while training reads them."""

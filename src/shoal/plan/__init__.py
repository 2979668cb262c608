"""What a strategy means and whether it can work."""

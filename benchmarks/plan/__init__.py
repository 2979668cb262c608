"""What predictions are worth."""

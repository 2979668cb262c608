"""What a fault costs."""

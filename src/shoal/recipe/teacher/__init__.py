"""Teachers: models that do not learn, and what a student learns from them."""

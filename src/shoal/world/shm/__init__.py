"""The c10d backend "shoal": collectives through memory that the workers of one host share."""

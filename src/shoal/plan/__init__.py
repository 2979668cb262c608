"""What a strategy means, whether it can work, and what it would take: search, prediction, what was learned."""

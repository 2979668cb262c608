"""What a benchmark leaves: results as JSON, tables, pictures, and docs/numbers.md."""

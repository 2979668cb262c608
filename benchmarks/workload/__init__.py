"""What several benchmarks measure with: a model and its loops, contestants in turns, servers, other hosts."""

def measure(t): return 0

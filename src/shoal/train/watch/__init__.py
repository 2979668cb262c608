"""While a run trains: slow ranks, clocks apart, numbers that are not finite, replicas that differ; each named."""

"""zero3's units, row shards, all-gathers and reduce-scatters on torch's FSDP2."""

"""What Shoal costs and gains, beside its peers. `scripts/bench NAME` runs one benchmark; README.md lists them."""

"""A shard of dense parameters: values, optimizer, gradients that wait for their update."""

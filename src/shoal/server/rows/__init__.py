"""A shard of a SparseEmbedding: rows by id, their optimizer, gradients that wait for their update."""

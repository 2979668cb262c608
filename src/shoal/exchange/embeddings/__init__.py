"""SparseEmbedding: tables, row requests, and the servers or local machines that hold the rows."""

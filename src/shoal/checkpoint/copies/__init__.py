"""Other copies of a checkpoint, in memory and at a URL: which there are, which is newest, which stay."""

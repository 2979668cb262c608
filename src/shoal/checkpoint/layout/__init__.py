"""What a checkpoint consists of: regions of logical tensors, files, the manifest."""

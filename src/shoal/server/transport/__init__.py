"""Bytes between processes: frames, keys, sockets, encryption, shared memory."""

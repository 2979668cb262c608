"""The `shoal` command: one file a verb, put together in `main`. Nothing here imports torch at the top."""

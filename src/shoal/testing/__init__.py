"""For tests of Shoal and of plug-ins: toys chosen to hurt, real processes, parity with one process."""

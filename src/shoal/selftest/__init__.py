"""`shoal selftest`: what the tests hold Shoal to, on the user's own machine and cards, without pytest."""

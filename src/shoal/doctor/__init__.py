"""`shoal doctor`: what is wrong with a machine, or between several, before anybody trains on them."""

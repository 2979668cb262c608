"""`shoal run --hosts hosts.txt`: a launcher on each of several hosts, started over ssh, and one end for all of them."""

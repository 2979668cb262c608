"""Who is here and how they talk. Nothing below this folder knows that there is more than one process.

launch.py      how this process was started: the only reader of rank variables
rendezvous.py  the store in which the workers of a job meet
world.py       `World`: rank, size, hosts, and the collectives that everything above calls
buckets.py     where parameters and gradients lie in a few flat vectors
mesh.py        this worker's place on the data, stage and tensor axes
shm/           the c10d backend "shoal": collectives through memory that the workers of one host share
network/       the collectives of a `World` over gloo, compared before a number is used
gloo.py        groups that span hosts, and messages between two ranks
two_level/     collectives on two levels, within hosts and between; hosts.py says who is on which
devices.py     where a worker computes; traffic.py counts what it sends
progress_page.py  how far a worker is, for its launcher; private_folder.py goes with the process that made it
failure.py     how a worker ends in one sentence, and which frames of an error are the user's
"""

"""Who is here and how they talk. Nothing below this folder knows that there is more than one process.

launch.py      how this process was started: the only reader of rank variables
rendezvous.py  the store in which the workers of a job meet
world.py       `World`: rank, size, hosts, and the collectives that everything above calls
buckets.py     where parameters and gradients lie in a few flat vectors
memory.py      memory that the workers of a host share, under no name
flags.py       how they wait for each other there: counters and futex
shm.py         the c10d backend "shoal"; shm_flat, shm_ops and shm_work are its parts
gloo.py        groups that span hosts, and messages between two ranks
levels.py      collectives on two levels, within hosts and between; reach and stages are its parts
devices.py     where a worker computes; traffic.py counts what it sends
failure.py     how a worker ends in one sentence when no launcher of ours watches
"""

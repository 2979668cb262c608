"""Jobs on Slurm: the batch script of a job, and Slurm's own commands."""

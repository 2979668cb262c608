"""`shoal plan`: for this machine, for machines on paper, and beside what a run measured."""

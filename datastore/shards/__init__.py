"""Work that is divided: shards, and what runs them in this process, in others, on a Ray cluster or under Slurm."""

"""The page at `/`: a chat and a view of the stack, plain files that ask this gateway and nobody else."""

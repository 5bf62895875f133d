"""Several processes that are one trainer: who they are, what rank 0 tells the others, how weights and rows are split."""

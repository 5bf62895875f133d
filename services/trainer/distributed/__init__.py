"""Several processes that act as one trainer: their layout, rank 0's messages to the others, and sharding."""

"""Several processes that act as one trainer: their layout, process groups, and messages."""

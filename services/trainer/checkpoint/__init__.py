"""How a trainer goes on where another left off: what a checkpoint holds beside tensors, how it is written and found."""

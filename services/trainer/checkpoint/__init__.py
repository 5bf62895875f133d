"""Checkpoints with which a trainer resumes a run: their contents beside tensors, and how they are written and found."""

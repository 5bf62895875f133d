"""Checkpoints from which a trainer resumes a run: their contents, and how they are written and found."""

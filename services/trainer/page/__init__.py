"""The live page of a run, served by its trainer: what the run looks like now, and how it came there."""

"""The trainer's compute core: turns sequences and advantages into new weights and metrics."""

"""The trainer's compute core: turns sequences and advantages into new weights and metrics. `step.Learner` is the entry point.

Other modules handle streams, weight transfers and checkpoint files.
"""

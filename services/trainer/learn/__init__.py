"""The trainer's compute core: sequences and advantages in, new weights and metrics out. `step.Learner` is the entry.

Not here: streams, versions on the wire, checkpoint files.
"""

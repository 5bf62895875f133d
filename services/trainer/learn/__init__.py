"""The trainer's compute core: sequences and advantages in, new weights and metrics out. `step.Learner` is the entry.

Streams, versions on the wire and checkpoint files are handled elsewhere.
"""

"""Reporting of a run: records of steps, samples, metrics, the live page, trackers and the summary."""

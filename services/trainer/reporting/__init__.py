"""Reporting of a run: step records, samples, metrics, the live page, trackers and the summary."""

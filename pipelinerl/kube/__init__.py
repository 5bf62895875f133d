"""The trainer's use of the Kubernetes API: it watches pods and, at a run's end, scales the release to zero.

This package does not decide what a pod's end means for a run.
"""

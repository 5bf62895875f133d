"""Calls of the trainer to the Kubernetes API. Other modules decide what a pod's end means for a run."""

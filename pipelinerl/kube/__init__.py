"""The trainer's use of the Kubernetes API, without a decision on what a pod's end means for a run."""

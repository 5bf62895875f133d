"""Calls to the Kubernetes API: the trainer's, and those of a person who submits runs. Other modules decide what a pod's end
means for a run."""

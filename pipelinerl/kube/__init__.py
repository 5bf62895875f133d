"""What the services ask of the Kubernetes API, over the official client: watch pods, annotate a pod, create Events.

Light: no torch, and `kubernetes` itself is imported at the first call. Nothing here decides what a pod's end means for a run.
"""

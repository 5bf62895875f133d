"""What the trainer asks of the Kubernetes API: to watch pods and to create Events.

Nothing here decides what a pod's end means for a run.
"""

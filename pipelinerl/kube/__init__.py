"""What the trainer asks of the Kubernetes API: to watch pods and, at a run's end, to scale it away.

Nothing here decides what a pod's end means for a run.
"""

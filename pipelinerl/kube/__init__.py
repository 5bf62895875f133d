"""Calls of the trainer to the Kubernetes API, the page of a release, and checks of the chart's values. Other modules decide what
a pod's end means for a run."""

"""Calls to the Kubernetes API by the trainer and by people who submit runs, a release's page, and checks of the chart's values.
Other modules decide what a pod's end means for a run."""

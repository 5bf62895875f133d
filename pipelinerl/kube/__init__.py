"""The trainer's calls to the Kubernetes API, a release's page, and checks of the chart's values. Other modules decide what a
pod's end means for a run."""

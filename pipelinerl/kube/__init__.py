"""Kubernetes: calls to its API by the trainer and by people who submit runs, the page of a release, and checks of the chart's
values."""

"""Grafana dashboards as code: one module for each, `python -m deploy.dashboards` writes their JSON into the chart.

The JSON is committed and a test compares it with what this package makes. Nothing here talks to a Grafana or a Prometheus.
"""

"""Runs on one machine: credentials, service processes, progress and reports."""

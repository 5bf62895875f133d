"""One machine: run directories, service processes, progress and reports of a local run."""

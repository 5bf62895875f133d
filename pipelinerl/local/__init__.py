"""The parts of a local run, that is, a run on one machine: credentials, service processes, progress and reports."""

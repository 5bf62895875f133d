"""Parts of every service's process: settings, logs, HTTP health and metrics, gRPC, TLS, signals and exit codes.

Nothing here knows about actors, trainers or verifiers.
"""

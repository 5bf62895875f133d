"""What every service's process shares: logs, HTTP health and metrics, a gRPC server, the address file, signals.

Nothing here knows what an actor, a trainer or a verifier does.
"""

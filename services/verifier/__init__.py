"""Turns completions into rewards: a gRPC server in front of worker processes. Needs neither torch nor a GPU."""

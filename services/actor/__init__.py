"""The actor: generates with vLLM, swaps weights in flight, publishes finished sequences."""

"""Initial policies that a run makes itself: a small warm-started Llama, or SmolLM2 out of a PyPI package."""

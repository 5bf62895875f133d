"""PipelineRL: reinforcement learning with in-flight weight updates, on Kubernetes.

The services share this package. Only `transfer` imports torch, and nothing here imports vLLM or transformers.
"""

__version__ = "0.1.0"

"""PipelineRL: reinforcement learning with in-flight weight updates, on Kubernetes.

The services share this package. It is light on purpose: nothing in it imports torch, vLLM or transformers.
"""

__version__ = "0.1.0"

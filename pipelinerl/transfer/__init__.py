"""Weight transfer, shared by trainer and actor: manifest, chunks and collective groups.

`manifest.py` does not import torch, so that the rest of `pipelinerl` can use it.
"""

"""What trainer and actor both need for moving weights: manifest, chunks and collective groups. Neither imports the other.

`manifest.py` is free of torch, and with it the rest of `pipelinerl`.
"""

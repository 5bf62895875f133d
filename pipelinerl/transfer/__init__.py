"""What both ends of a weight transfer agree on, as pure data. No torch, no transport.

What trainer and actor both need from torch for moving weights: collective groups and chunks. Neither service imports
the other, and `pipelinerl` itself stays free of torch.
"""

from __future__ import annotations

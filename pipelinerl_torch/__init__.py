"""What trainer and actor both need from torch for moving weights: collective groups and chunks. Neither service imports
the other, and `pipelinerl` itself stays free of torch."""

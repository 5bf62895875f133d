"""What a run writes of itself: records of steps, samples, the summary."""

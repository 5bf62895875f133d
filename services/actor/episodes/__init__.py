"""Episodes as their actor sees them: it samples their turns, and records which tokens were sampled and which observed."""

"""The actor's part in episodes: it samples their turns, and records which tokens were sampled and which were observed."""

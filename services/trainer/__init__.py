"""The trainer: issues prompts, turns sequences into policy versions, and sends each version to every actor."""

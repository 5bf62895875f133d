"""The trainer: issues prompts, turns sequences into policy versions, sends each to every actor."""

"""Recipes: their fields, how they are loaded, and the checks before a run starts."""

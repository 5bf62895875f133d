"""Recipes: their fields, loading and checks, before anything starts."""

"""The small models that come with the package."""

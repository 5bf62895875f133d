"""Sources of problems. Importing this package imports neither reasoning-gym nor pyarrow."""

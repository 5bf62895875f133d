"""Where problems come from. Light: importing it imports neither reasoning-gym nor pyarrow."""

"""What users write (recipes) and where a process runs (settings), validated before anything starts."""

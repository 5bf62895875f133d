"""What `pipelinerl <command>` does, one module for each command. Importing them is light; executing may not be."""

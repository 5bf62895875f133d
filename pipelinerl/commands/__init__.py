"""The functions behind `pipelinerl <command>`; `pipelinerl.cli` imports a module when its command runs."""

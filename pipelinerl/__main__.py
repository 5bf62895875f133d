"""Run the command `pipelinerl` as `python -m pipelinerl`, even if its script is not on the PATH."""

from pipelinerl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

"""`python -m pipelinerl`: the command `pipelinerl`, also where its script is not on the PATH."""

from pipelinerl.cli import main

if __name__ == "__main__":
    raise SystemExit(main())

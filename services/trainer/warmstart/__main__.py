"""`python -m services.trainer.warmstart --config FILE.json --out DIR`: makes a run's initial model.

The file holds a recipe's `model` and `task` sections, as `pipelinerl/local/initial_model.py` writes it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from pipelinerl.config.recipe import ModelConfig, TaskConfig
from pipelinerl.local.initial_model import PROGRESS
from pipelinerl.service.lifecycle import exit_code


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.warmstart", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="JSON with model and task")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the model")
    arguments = parser.parse_args()

    def run() -> None:
        from transformers.utils import logging

        from services.trainer.warmstart.build import build

        logging.disable_progress_bar()
        sections = json.loads(arguments.config.read_text(encoding="utf-8"))
        model, task = ModelConfig(**sections["model"]), TaskConfig(**sections["task"])
        build(model, task, arguments.out, lambda line: print(f"{PROGRESS}{line}", flush=True))

    return exit_code(run)


if __name__ == "__main__":
    sys.exit(main())

"""`pipelinerl report RUN_DIR`: writes report.html again from what the run directory holds."""

from __future__ import annotations

import argparse
from pathlib import Path

NAME = "report"
HELP = "rebuild report.html of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run, finished or not")


def execute(args: argparse.Namespace) -> int:
    """Prints the report's path. Raises `FieldError` when the folder is not a run's."""
    from pipelinerl.local.ending import write_report

    print(write_report(args.run_dir))
    return 0

"""`pipelinerl audit RUN_DIR`: derives the run's ledger again and says whether everything adds up."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipelinerl.commands.streams import add_server_arguments, holds_streams, streams_of
from pipelinerl.run_dir import NAMED_IN, RunDir, run_name

NAME = "audit"
HELP = "derive a run's ledger again from its journal, checkpoints and streams"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a current, finished or crashed run")
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--versions", action="store_true", help="list every version, not only unusual ones")


def execute(args: argparse.Namespace) -> int:
    """Exit code: 0 all adds up, 1 something does not. Raises `FieldError` for a folder that is not a run's.

    Where neither the folder nor the environment says anything of streams, the files alone are judged.
    """
    import asyncio
    import json

    from pipelinerl.audit.audit import audit_run
    from pipelinerl.audit.report import as_json, lines
    from pipelinerl.errors import FieldError
    from pipelinerl.local.processes import living_names

    run = run_name(args.run_dir)
    if not any((args.run_dir / file).is_file() for file in NAMED_IN):
        what = "has neither run.json nor lineage.json: give the folder of a run"
        raise FieldError("RUN_DIR", str(args.run_dir), what)
    streams = streams_of(args, run)
    elsewhere = streams is not None and (args.nats or not holds_streams(args.run_dir))
    at_work = (lambda: True) if elsewhere else (lambda: "trainer" in living_names(RunDir(args.run_dir, "")))
    audit = asyncio.run(audit_run(run, args.run_dir, streams, at_work))
    if args.json:
        print(json.dumps(as_json(audit, args.versions), indent=2))
    else:
        print("\n".join(lines(audit, args.versions)))
    return 0 if audit.ok else 1

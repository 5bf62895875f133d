"""`pipelinerl audit RUN_DIR`: derives the run's ledger again and says whether everything adds up."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipelinerl.commands.streams import RunStreams, add_server_arguments, holds_streams, streams_in_environment

NAME = "audit"
HELP = "derive a run's ledger again from its journal, checkpoints and streams"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a current, finished or crashed run")
    add_server_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--versions", action="store_true", help="list every version, not only unusual ones")


def execute(args: argparse.Namespace) -> int:
    """Exit code: 0 all adds up, 1 something does not. Raises `FieldError` for a folder that is not a run's."""
    import asyncio
    import json

    from pipelinerl.audit.audit import as_json, audit_run, lines

    run = _run_name(args.run_dir)
    streams = _streams(args, run)
    at_work = (lambda: True) if streams and streams.nats_url else (lambda: _trainer_lives(args.run_dir))
    audit = asyncio.run(audit_run(run, args.run_dir, streams.open if streams else None, at_work))
    if args.json:
        print(json.dumps(as_json(audit, args.versions), indent=2))
    else:
        print("\n".join(lines(audit, args.versions)))
    return 0 if audit.ok else 1


def _run_name(run_dir: Path) -> str:
    from pipelinerl.audit.files import LINEAGE, read_json
    from pipelinerl.bus.protocol import check_run_name
    from pipelinerl.errors import FieldError

    for name in ("run.json", LINEAGE):
        content = read_json(run_dir / name) if run_dir.is_dir() else None
        if content is not None and "run" in content:
            return check_run_name(str(content["run"]), "RUN_DIR")
    what = "has neither run.json nor lineage.json" if run_dir.is_dir() else "is no folder"
    raise FieldError("RUN_DIR", str(run_dir), f"{what}: give the folder of a run")


def _streams(args: argparse.Namespace, run: str) -> RunStreams | None:
    """None where neither the folder nor the environment says anything of streams."""
    if args.nats:
        return RunStreams(None, args.nats, run, args.credentials, args.tls_dir)
    return RunStreams(args.run_dir) if holds_streams(args.run_dir) else streams_in_environment(run)


def _trainer_lives(run_dir: Path) -> bool:
    from pipelinerl.local.processes import living_names
    from pipelinerl.run_dir import RunDir

    return "trainer" in living_names(RunDir(run_dir, ""))

"""Arguments of the commands that look at a run's streams: the folder of a local run, or a NATS server and a run's name."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelinerl.local.run_streams import RunStreams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, nargs="?", help="folder of a local run, ended or not")
    parser.add_argument("--nats", metavar="URL", default="", help="NATS server of a run elsewhere: nats://host:4222")
    parser.add_argument("--run", metavar="NAME", default="", help="name of that run")
    parser.add_argument("--credentials", metavar="FILE", type=Path, help="file with user:password, or a .creds file")


def streams_of(args: argparse.Namespace) -> RunStreams:
    """Raises `FieldError` when the arguments do not say where the streams are."""
    from pipelinerl.local.run_streams import RunStreams

    return RunStreams(args.run_dir, args.nats, args.run, args.credentials)

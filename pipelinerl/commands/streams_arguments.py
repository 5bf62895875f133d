"""Arguments of the commands that look at a run's streams: the folder of a local run, or a NATS server and a run's name.

In a pod of a run neither need be given: the variables that its service is configured by say where NATS is.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipelinerl.local.run_streams import RunStreams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, nargs="?", help="folder of a local run, ended or not")
    add_server_arguments(parser)
    parser.add_argument("--run", metavar="NAME", default="", help="name of that run")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nats",
        metavar="URL",
        default="",
        help="NATS server of a run elsewhere: nats://host:4222; in a pod of the run: that pod's",
    )
    parser.add_argument("--credentials", metavar="FILE", type=Path, help="file with user:password, or a .creds file")
    parser.add_argument(
        "--tls-dir", metavar="DIR", type=Path, help="folder with ca.crt, and tls.crt and tls.key if asked"
    )


def streams_of(args: argparse.Namespace) -> RunStreams:
    """Raises `FieldError` when neither the arguments nor the environment say where the streams are."""
    from pipelinerl.local.run_streams import RunStreams, holds_streams, run_name

    if not args.nats and not (args.run_dir and holds_streams(args.run_dir)):
        run = args.run or (run_name(args.run_dir) if args.run_dir else "")
        if (elsewhere := streams_in_environment(run)) is not None:
            return elsewhere
    return RunStreams(args.run_dir, args.nats, args.run, args.credentials, args.tls_dir)


def streams_in_environment(run: str = "") -> RunStreams | None:
    """Of `run`, or of the run that the environment names; None where it names no NATS server."""
    from pipelinerl.local.run_streams import RunStreams
    from pipelinerl.service.settings import StreamsSettings

    found = StreamsSettings()
    if not found.nats_url:
        return None
    return RunStreams(None, found.nats_url, run or found.run, found.nats_credentials, found.nats_tls_dir)

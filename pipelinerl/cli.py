"""The `pipelinerl` command: parse arguments, call a command module, turn errors into exit codes.

Exit codes: 0 done, 1 failed, 2 a user's mistake (arguments, recipe, folder), 130 interrupted, 141 the reader closed the output.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from pipelinerl import __version__
from pipelinerl.commands import cache, plan, run, scale, validate
from pipelinerl.commands.run_folder import AUDIT, DEAD_LETTERS, REPORT
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.service.logs import printable

COMMANDS = (run.COMMAND, scale.COMMAND, validate.COMMAND, plan.COMMAND, REPORT, AUDIT, DEAD_LETTERS, cache.COMMAND)

FAILED, WRONG_USE, INTERRUPTED, UNREAD = 1, 2, 130, 141


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipelinerl", description="Reinforcement learning for language models with in-flight weight updates."
    )
    parser.add_argument("--version", action="version", version=f"pipelinerl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, text, add_arguments, execute in COMMANDS:
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        command.set_defaults(execute=execute)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser, code = build_parser(), UNREAD
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(argv)
    try:
        code = args.execute(args)
        if sys.stdout is not None:  # `>&-` closed it before the start
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python prints a second error at exit
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except PipelineRLError as error:
        print(f"pipelinerl: {printable(str(error))}", file=sys.stderr)  # it may quote a user's code, data and model output
        return WRONG_USE if isinstance(error, UserError) else FAILED
    return code


if __name__ == "__main__":
    sys.exit(main())

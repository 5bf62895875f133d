"""The `pipelinerl` command: the arguments of its commands, their completion in a shell, and exit codes for errors.

A command's module is imported only when the command runs, because the import may be slow. Exit codes: 0 done, 1 failed, 2 a
user's mistake (arguments, recipe, folder), 130 interrupted, 141 the reader of the output closed it.
"""

from __future__ import annotations

import argparse
import glob
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelinerl import __version__
from pipelinerl.errors import PipelineRLError, UserError
from pipelinerl.service.logs import printable

FAILED, WRONG_USE, INTERRUPTED, UNREAD = 1, 2, 130, 141


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipelinerl", description="Reinforcement learning for language models with in-flight weight updates."
    )
    parser.add_argument("--version", action="version", version=f"pipelinerl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (text, add_arguments, execute) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        add_arguments(command)
        command.set_defaults(execute=execute)
    return parser


def parsed(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Return the arguments. Those of `serve` behind `--` are `passed_on`. Raises `SystemExit` for a mistake."""
    end = argv.index("--") if argv[:1] == ["serve"] and "--" in argv else len(argv)
    args, others = parser.parse_known_args(argv[:end], argparse.Namespace(passed_on=argv[end + 1 :]))
    if others and args.command == "chat" and args.prompt is None and (others[0] == "--" or not others[0].startswith("-")):
        begin = others[0] == "--"  # argparse of Python 3.11 finds no optional argument behind options
        args.prompt, others = "".join(others[begin : begin + 1]), others[begin + 1 :]
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    parser, code = build_parser(), UNREAD
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parsed(parser, list(sys.argv[1:] if argv is None else argv))
    module, _, function = args.execute.partition(":")
    try:
        code = getattr(importlib.import_module(f"pipelinerl.commands.{module}"), function)(args)
        if sys.stdout is not None:  # None if the shell closed it, as by `>&-`
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python prints a second error at exit
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except PipelineRLError as error:
        print(f"pipelinerl: {printable(str(error))}", file=sys.stderr)  # the message may quote code, data or a model's output
        return WRONG_USE if isinstance(error, UserError) else FAILED
    return code


def _recipe(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    recipe = parser.add_argument("recipe", metavar="RECIPE", nargs=nargs, help="recipe file, or the name of one under recipes/")
    override = parser.add_argument(
        "--set", dest="overrides", metavar="a.b=c", action="append", default=[],
        help="override one field of the recipe; the value is YAML (repeatable)",
    )  # fmt: skip
    recipe.completer, override.completer = _recipes, _fields  # type: ignore[attr-defined]


def _recipes(prefix: str, **_: Any) -> list[str]:
    from pipelinerl.recipe.loading import recipe_names

    return [*recipe_names(), *glob.glob(f"{prefix}*")]


def _fields(prefix: str, **_rest: Any) -> list[str]:
    from pipelinerl.recipe.fields import Recipe, choices, dotted_paths, field_at

    path, equals, _ = prefix.partition("=")
    if equals and (field := field_at(Recipe, tuple(path.split(".")))):
        return [f"{path}={choice}" for choice in choices(field.annotation)]
    return [f"{path}=" for path in dotted_paths(Recipe)]


def _run(parser: argparse.ArgumentParser) -> None:
    _recipe(parser, nargs="?")
    parser.add_argument("--actors", metavar="N", type=int, help="number of actor processes; short for --set actor.count=N")
    parser.add_argument("--run-dir", metavar="DIR", type=Path, help="folder of the run (default: runs/<name>)")
    parser.add_argument("--name", metavar="NAME", help="name of the run (default: <recipe>-<date>-<time>)")
    parser.add_argument(
        "--reward-rows", metavar="N", type=int, default=2,
        help="number of problems on which each reward is tried before the run starts (default: 2; use 0 if calls cost money)",
    )  # fmt: skip
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--page-port", metavar="PORT", type=int, default=0, help="port of the live page (default: any free one)")
    page.add_argument("--no-page", action="store_true", help="serve no live page")
    parser.add_argument(
        "--resume", metavar="DIR", type=Path,
        help="continue the run in DIR with its own recipe; RECIPE and --set may change some fields",
    )  # fmt: skip
    parser.add_argument(
        "--placement", metavar="JSON|FILE", default="",
        help="GPUs of each trainer rank and each actor, by UUID or position; a run's placement.json is an example",
    )  # fmt: skip
    parser.add_argument(
        "--metrics-port", metavar="PORT", type=int, default=0,
        help="port on this machine for the runner's /metrics and for /targets, where Prometheus finds the run's services "
        "(default: any free one)",
    )  # fmt: skip


def _scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["actors"], help="service to scale")
    parser.add_argument("count", metavar="N", type=int, help="number of actors to reach")
    parser.add_argument("--run-dir", type=Path, required=True, metavar="DIR", help="folder of the run")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds to wait until all serve (300)")


def _submit(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl submit gsm -n rl --values gpus.yaml --set trainer.steps=500 --watch")
    _recipe(parser, nargs="?")
    _namespace(parser)
    parser.add_argument("--release", metavar="NAME", help="name of the release and of the run (default: the recipe's name)")
    parser.add_argument(
        "--values", metavar="FILE", type=Path, action="append", default=[],
        help="file with values of the chart, which override those that this command sets (repeatable)",
    )  # fmt: skip
    watch = "show the run, fetch its report and checkpoint at its end, and remove the release and its volume claims"
    parser.add_argument("--watch", action="store_true", help=watch)
    parser.add_argument("--attach", metavar="RELEASE", help="do as --watch with a release that was submitted before")
    parser.add_argument("--keep", action="store_true", help="remove nothing after the results were fetched")
    parser.add_argument("--output", metavar="DIR", type=Path, help="folder for the results (default: runs/<name>)")
    parser.add_argument("--chart", metavar="PATH|URL", help="folder, archive or oci:// address (default: deploy/helm)")


def _runs(parser: argparse.ArgumentParser) -> None:
    _namespace(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def _namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", metavar="NAMESPACE", required=True, help="namespace in the cluster")
    parser.add_argument("--context", metavar="NAME", default="", help="context of the kubeconfig (default: the current one)")


def _validate(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    parser.add_argument(
        "--fields-only", action="store_true",
        help="check only the fields, not the files, folders and functions that they name, which may be on another machine",
    )  # fmt: skip
    parser.add_argument(
        "--chart-values", metavar="FILE", type=Path,
        help="values of the chart in deploy/helm, as its validation Job passes them; also check these against the recipe",
    )  # fmt: skip
    parser.add_argument(
        "--reward-rows", metavar="N", type=int, default=20,
        help="number of problems on which each reward is tried, with the reference answer as completion (default: 20)",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory", metavar="SIZE",
        help="memory of a GPU, such as 80GiB; also prints how much the recipe needs, with advice. With several trainer nodes, "
        "set the total number of ranks by --set trainer.nproc=N",
    )  # fmt: skip
    parser.add_argument(
        "--parameters", metavar="SIZE",
        help="number of the model's parameters, including all experts, such as 7.6B, for --gpu-memory (default: read from the "
        "model's files, or else the number in its name plus a tenth)",
    )  # fmt: skip


def _doctor(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl doctor my.yaml --set trainer.steps=500", "pipelinerl doctor runs/try")
    parser.add_argument("subject", metavar="RECIPE|RUN", help="recipe file or name, or the folder of a run, finished or not")
    parser.add_argument("--set", dest="overrides", metavar="a.b=c", action="append", default=[], help="override a field")
    parser.add_argument(
        "--reward-rows", metavar="N", type=int, default=20, help="number of problems on which a recipe's rewards are tried (20)"
    )
    parser.add_argument("--gpu-memory", metavar="SIZE", help="memory of a GPU, such as 80GiB, to check that a recipe fits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="RUN|CHECKPOINT", type=Path, help="folder of a run, a checkpoint or an adapter")
    parser.add_argument("--version", metavar="N", type=int, help="version of the run's policy (default: the newest)")


def _chat(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl chat runs/try", 'pipelinerl chat runs/try "12+7="      # prints only the completion')
    _policy(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="complete this, or the text on standard input, and end")
    parser.add_argument("--system", metavar="TEXT", help="system message (default: the recipe's)")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 is greedy (default: evaluation.temperature)")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="limit of an answer (default: the recipe's, or else 512)")


def _serve(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl serve runs/try --version 20 -- --port 8001")
    _policy(parser)
    parser.add_argument("--print", action="store_true", help="print the command of vLLM, and end")
    parser.usage = "%(prog)s [-h] [--version N] [--print] RUN|CHECKPOINT [-- ARGUMENT_OF_VLLM ...]"


def _plan(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    parser.add_argument("--parameters", metavar="SIZE", required=True, help="model parameters with all experts, such as 7.6B")
    parser.add_argument(
        "--active-parameters", metavar="SIZE",
        help="parameters that a token uses in a mixture of experts, such as 3.3B (default: by the model's config.json or name)",
    )  # fmt: skip
    parser.add_argument("--accelerators", metavar="N", type=int, required=True, help="number of accelerators to divide")
    parser.add_argument(
        "--accelerator", metavar="NAME|FILE", default="H100",
        help="A100, H100, H200, ..., or a JSON file of measured speeds, see docs/planning.md (default: H100)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", metavar="BARS|RUN_DIR", required=True,
        help="completion lengths: either the bars of a histogram, each TOKENS:WEIGHT or FROM-TO:WEIGHT, such as "
        "1-512:6,513-2048:3,8192:1, or the folder of a run that recorded its lengths",
    )  # fmt: skip
    parser.add_argument("--sequences-in-progress", metavar="H", type=int, help="sequences on each actor (default: the best)")
    parser.add_argument(
        "--kv-kib-per-token", metavar="KIB", type=float, help="KV cache per token (default: the usual size for such a model)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as one JSON object")


def _report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a run, finished or not")


def _compare(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl compare runs/low-rate runs/high-rate --open")
    parser.add_argument("runs", metavar="RUN", type=Path, nargs="+", help="folders of two or more runs, finished or not")
    parser.add_argument("--out", metavar="FILE", type=Path, help="file of the page (default: compare.html, or none with --csv)")
    parser.add_argument("--csv", metavar="FILE|-", type=Path, help="file for a row per step with all figures (- for stdout)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def _audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="folder of a current, finished or crashed run")
    _server(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--versions", action="store_true", help="list every version, not only unusual ones")


def _replay(parser: argparse.ArgumentParser) -> None:
    _example(
        parser,
        "pipelinerl replay runs/try                                      # every step, and compare the digests",
        "pipelinerl replay runs/try --from 40 --to 60 --set algorithm.loss=grpo",
        "pipelinerl replay runs/try --step 47 --tokens                   # tokens of the sequences in which π and μ differ",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run with `record: true`, finished or not")
    parser.add_argument("--from", dest="first", metavar="STEP", type=int, help="first step to show (default: the first one)")
    parser.add_argument("--to", dest="last", metavar="STEP", type=int, help="last step (default: the last recorded one)")
    parser.add_argument("--step", metavar="STEP", type=int, help="a single step; short for --from STEP --to STEP")
    parser.add_argument("--tokens", action="store_true", help="show the tokens of --step instead of its figures")
    parser.add_argument("--most", metavar="N", type=int, default=4, help="number of sequences that --tokens shows (4)")
    parser.add_argument(
        "--set", dest="overrides", metavar="a.b=c", action="append", default=[],
        help="compute with another field of trainer or algorithm (repeatable); figures are shown beside the recorded ones",
    )  # fmt: skip


def _rollback(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl rollback runs/try --to 40", "pipelinerl run --resume runs/try")
    parser.add_argument("run", metavar="RUN", type=Path, help="folder of a run with `record: true` that does not run now")
    parser.add_argument(
        "--to", metavar="VERSION", type=int, required=True,
        help="version from which to continue; without a checkpoint, it is computed from the recorded steps",
    )  # fmt: skip


def _dead_letters(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, nargs="?", help="folder of a local run, finished or not")
    _server(parser)
    parser.add_argument("--run", metavar="NAME", default="", help="name of the run on the NATS server")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line, with the whole prompt")


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nats", metavar="URL", default="",
        help="NATS server of a run on other machines, such as nats://host:4222 (default in a run's pod: the pod's setting)",
    )  # fmt: skip
    parser.add_argument("--credentials", metavar="FILE", type=Path, help="file with user:password, or a .creds file")
    parser.add_argument(
        "--tls-dir", metavar="DIR", type=Path, help="folder with ca.crt, and tls.crt and tls.key if the server requires them"
    )


def _cache(parser: argparse.ArgumentParser) -> None:
    clear = parser.add_argument(
        "--clear", metavar="NAME", nargs="*", help="remove these entries, or all if none is named; keep those of a running run"
    )
    clear.completer = _kept  # type: ignore[attr-defined]


def _listed(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl recipes --json | jq '.[] | select(.device == \"cpu\").name'")
    parser.add_argument("--json", action="store_true", help="print one JSON array")


def _init(parser: argparse.ArgumentParser) -> None:
    _example(
        parser,
        "pipelinerl init my-task                           # ten sums for a small model, with a reward in Python",
        "pipelinerl init my-task --data questions.csv      # your questions, for SmolLM2 or a model of the hub",
        "pipelinerl init my-agent --from agent",
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder to write; it must be new or empty")
    parser.add_argument(
        "--from", dest="template", metavar="TEMPLATE", choices=("gsm8k", "agent", "tools", "environment", "code", "judge"),
        help="what to begin with: gsm8k, agent, tools, environment, code or judge (default: questions and answers)",
    )  # fmt: skip
    parser.add_argument(
        "--data", metavar="FILE", type=Path, help="your questions and answers, as CSV, TSV, JSONL, JSON or Parquet"
    )
    parser.add_argument("--question", metavar="COLUMN", help="column of --data with the questions (default: a usual name)")
    parser.add_argument("--answer", metavar="COLUMN", help="column of --data with the answers (default: a usual name)")


def _example(parser: argparse.ArgumentParser, *lines: str) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n  ".join([f"example{'s' if lines[1:] else ''}:", *lines])


def _kept(**_: Any) -> list[str]:
    from pipelinerl.commands.run import kept_folders

    return list(kept_folders())


COMMANDS = {
    "init": ("write a folder with a recipe, a reward and data, to begin a task of your own", _init, "init:init"),
    "recipes": ("list the recipes that come with pipelinerl, with what each needs", _listed, "init:recipes"),
    "run": ("train a model on this machine, as a recipe says", _run, "run:run"),
    "submit": ("train a model in a Kubernetes cluster, as one release of the Helm chart", _submit, "submit:submit"),
    "runs": ("list the runs of a namespace in a Kubernetes cluster", _runs, "submit:runs"),
    "scale": ("change the number of actors of a running local run (in a cluster: kubectl scale)", _scale, "run:scale"),
    "validate": ("check a recipe and print a summary of it", _validate, "validate:validate"),
    "doctor": ("say why a recipe will not learn, or why a run does not", _doctor, "doctor:doctor"),
    "chat": ("talk to a trained policy in the terminal", _chat, "chat:chat"),
    "serve": ("serve a trained policy by vLLM, with OpenAI's API", _serve, "chat:serve"),
    "plan": ("divide accelerators between actors and trainer (estimated; nothing is run)", _plan, "plan:plan"),
    "report": ("rebuild report.html of a run", _report, "run_folder:report"),
    "replay": ("compute a recorded run's optimizer steps again, and compare the weights", _replay, "replay:replay"),
    "rollback": ("let a recorded run continue from one of its earlier versions", _rollback, "replay:rollback"),
    "compare": ("compare runs: recipes, accuracies with intervals, curves, samples", _compare, "compare:compare"),
    "audit": ("recompute a run's ledger from its journal, checkpoints and streams", _audit, "run_folder:audit"),
    "dead-letters": ("list a run's abandoned prompt groups", _dead_letters, "run_folder:dead_letters"),
    "cache": ("list or remove files kept for the next run, such as initial models", _cache, "run:cache"),
}
"""For each command: its help, the function that adds its arguments, and the module and function in `pipelinerl.commands` that
execute it. The latter returns the exit code, and raises `UserError` for a mistake in the arguments."""


if __name__ == "__main__":
    sys.exit(main())

"""The `pipelinerl` command: the arguments of its commands, their completion in a shell, and exit codes for errors.

A command's module is imported only when the command runs, because the import may be slow. Exit codes: 0 success, 1 failure, 2 a
user's mistake (in arguments, recipe or folder), 130 interrupted, 141 output pipe closed by its reader before the command ended.
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
from pipelinerl.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_UNREAD, EXIT_USER_ERROR, PipelineRLError, UserError
from pipelinerl.service.logs import printable


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pipelinerl", description="Reinforcement learning for language models with in-flight weight updates."
    )
    parser.add_argument("--version", action="version", version=f"pipelinerl {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (text, execute, arguments, *examples) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        _add(command, arguments)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        command.epilog = "\n  ".join([f"example{'s' if examples[1:] else ''}:", *examples])
        command.set_defaults(execute=execute)
    commands.choices["serve"].usage = "%(prog)s [-h] [--version N] [--print] RUN|CHECKPOINT [-- ARGUMENT_OF_VLLM ...]"
    return parser


def _add(parser: Any, arguments: Sequence[Any]) -> None:
    """Add arguments, written as in `COMMANDS`, to a parser."""
    for row in arguments:
        if isinstance(row, list):
            _add(parser.add_mutually_exclusive_group(), row)
            continue
        name, kind, text, *more = row
        flags, _, metavar = name.partition(" ")
        keywords: dict[str, Any] = {"action": "store_true"} if kind is None and flags.startswith("-") else {}
        keywords |= {"metavar": metavar, "type": kind} if metavar else {}
        keywords.update(*more)
        completer = keywords.pop("completer", None)
        parser.add_argument(*flags.split("|"), help=text, **keywords).completer = completer


def parsed(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Parse `argv`. The arguments of `serve` after `--` become `passed_on`. Raises `SystemExit` for a mistake."""
    end = argv.index("--") if argv[:1] == ["serve"] and "--" in argv else len(argv)
    args, others = parser.parse_known_args(argv[:end], argparse.Namespace(passed_on=argv[end + 1 :]))
    if others and args.command == "chat" and args.prompt is None and (others[0] == "--" or not others[0].startswith("-")):
        begin = others[0] == "--"  # argparse in Python 3.11 misses an optional argument after options
        args.prompt, others = "".join(others[begin : begin + 1]), others[begin + 1 :]
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    parser, code = build_parser(), EXIT_UNREAD
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parsed(parser, list(sys.argv[1:] if argv is None else argv))
    module, _, function = args.execute.partition(":")
    try:
        code = getattr(importlib.import_module(f"pipelinerl.commands.{module}"), function)(args)
        if sys.stdout is not None:  # stdout is None if the shell closed it, as with `>&-`
            sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python prints a second error at exit
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except PipelineRLError as error:
        print(f"pipelinerl: {printable(str(error))}", file=sys.stderr)  # the message may quote code, data or a model's output
        return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE
    return code


def _recipes(prefix: str, **_: Any) -> list[str]:
    from pipelinerl.recipe.loading import known_recipes

    return [*known_recipes(), *glob.glob(f"{prefix}*")]


def _fields(prefix: str, **_rest: Any) -> list[str]:
    from pipelinerl.recipe.fields import Recipe, choices, dotted_paths, field_at

    path, equals, _ = prefix.partition("=")
    if equals and (field := field_at(Recipe, tuple(path.split(".")))):
        return [f"{path}={choice}" for choice in choices(field.annotation)]
    return [f"{path}=" for path in dotted_paths(Recipe)]


def _kept(**_: Any) -> list[str]:
    from pipelinerl.commands.run import kept_folders

    return list(kept_folders())


_OVERRIDES = {"dest": "overrides", "action": "append", "default": []}
_SET = ("--set a.b=c", str, "override a field of the recipe by a YAML value (repeatable)", _OVERRIDES | {"completer": _fields})
_RECIPE = ("recipe RECIPE", str, "recipe file, its folder, or the name of one under recipes/", {"completer": _recipes})
_PERHAPS = (*_RECIPE[:3], {"completer": _recipes, "nargs": "?"})
_ROWS = ("--reward-rows N", int, "number of problems on which each reward is tried (default: 20)", {"default": 20})
_SIZE = ("--parameters SIZE", str, "number of the model's parameters, including all experts, such as 7.6B, for --gpu-memory "
         "(default: from the model's files, or else 1.1 times the number in its name)")  # fmt: skip
_POLICY = (
    ("subject RUN|CHECKPOINT", Path, "folder of a run, a checkpoint or an adapter"),
    ("--version N", int, "version of the run's policy (default: the newest)"),
)
_CLUSTER = (
    ("-n|--namespace NAMESPACE", str, "namespace in the cluster", {"required": True}),
    ("--context NAME", str, "context of the kubeconfig (default: the current one)", {"default": ""}),
)
_STREAMS = (
    ("--nats URL", str, "NATS server, such as nats://host:4222, of a run on other machines (default: PIPELINERL_NATS_URL)"),
    ("--credentials FILE", Path, "file with user:password, or a .creds file"),
    ("--tls-dir DIR", Path, "folder with ca.crt, and with tls.crt and tls.key if the server asks for a certificate"),
)  # fmt: skip
_TEMPLATES = ("gsm8k", "agent", "tools", "environment", "code", "judge")

COMMANDS: dict[str, tuple[Any, ...]] = {
    "init": ("write a folder with a recipe, a reward and data, to begin a task of your own", "init:init", [
        ("folder DIR", Path, "folder to write; it must be new or empty"), [
            ("--from TEMPLATE", str, "what to begin with: gsm8k, agent, tools, environment, code or judge (default: questions "
             "and answers)", {"dest": "template", "choices": _TEMPLATES}),
            ("--data FILE", Path, "your questions and answers, as CSV, TSV, JSONL, JSON or Parquet"),
        ],
        ("--question COLUMN", str, "column of --data with the questions (default: question, prompt, ...)"),
        ("--answer COLUMN", str, "column of --data with the answers (default: answer, solution, ...)"),
    ],
        "pipelinerl init my-task                           # ten sums for a small model, with a reward in Python",
        "pipelinerl init my-task --data questions.csv      # your questions, for SmolLM2 or a model from the hub",
        "pipelinerl init my-agent --from agent",
    ),
    "recipes": ("list the recipes that come with pipelinerl, and what each needs", "init:recipes", [
        ("--json", None, "print one JSON array"),
    ], "pipelinerl recipes --json | jq '.[] | select(.device == \"cpu\").name'"),
    "run": ("train a model on this machine, as a recipe says", "run:run", [
        _PERHAPS, _SET,
        ("--actors N", int, "number of actor processes; short for --set actor.count=N"),
        ("--run-dir DIR", Path, "folder of the run (default: runs/<name>)"),
        ("--name NAME", str, "name of the run (default: <recipe>-<date>-<time>)"),
        ("--reward-rows N", int, "number of problems on which each reward is tried before the run starts (default: 2; use 0 if "
         "calls cost money)", {"default": 2}),
        [
            ("--page-port PORT", int, "port of the live page (default: any free one)", {"default": 0}),
            ("--no-page", None, "serve no live page"),
        ],
        ("--resume DIR", Path, "continue the run in DIR with its own recipe; RECIPE and --set may change some fields"),
        ("--placement JSON|FILE", str, "GPUs of each trainer rank and each actor, by UUID or position; a run's placement.json "
         "is an example", {"default": ""}),
        ("--metrics-port PORT", int, "port on this machine for the runner's /metrics and for /targets, where Prometheus finds "
         "the run's services (default: any free one)", {"default": 0}),
    ], "pipelinerl run arithmetic --actors 2 --set trainer.steps=100", "pipelinerl run --resume runs/try"),
    "submit": ("train a model in a Kubernetes cluster, as one release of the Helm chart", "submit:submit", [
        _PERHAPS, _SET, *_CLUSTER,
        ("--release NAME", str, "name of the release and of the run (default: the recipe's name)"),
        ("--values FILE", Path, "file with values of the chart, which override those that this command sets (repeatable)",
         {"action": "append", "default": []}),
        ("--watch", None, "show the run, fetch report and checkpoint at its end, and remove the release with its volumes"),
        ("--attach RELEASE", str, "as --watch, for a release that was submitted before"),
        ("--keep", None, "remove nothing after fetching the results"),
        ("--output DIR", Path, "folder for the results (default: runs/<name>)"),
        ("--chart PATH|URL", str, "folder, archive or oci:// address (default: deploy/helm)"),
    ], "pipelinerl submit gsm -n rl --values gpus.yaml --set trainer.steps=500 --watch"),
    "runs": ("list the runs of a namespace in a Kubernetes cluster", "submit:runs", [
        *_CLUSTER,
        ("--json", None, "print one JSON array"),
    ], "pipelinerl runs -n rl"),
    "scale": ("change the number of actors of a running local run (in a cluster: kubectl scale)", "run:scale", [
        ("what", None, "service to scale", {"choices": ["actors"]}),
        ("count N", int, "number of actors to reach"),
        ("--run-dir DIR", Path, "folder of the run", {"required": True}),
        ("--timeout S", float, "seconds to wait until all actors serve (default: 300)", {"default": 300.0}),
    ], "pipelinerl scale actors 3 --run-dir runs/try"),
    "validate": ("check a recipe and print a summary of it", "validate:validate", [
        _RECIPE, _SET, _ROWS,
        ("--fields-only", None, "check only the fields, not the files and functions that they name"),
        ("--chart-values FILE", Path, "values of the chart, as its validation Job passes them; check these too"),
        ("--gpu-memory SIZE", str, "memory of a GPU, such as 80GiB; then also print how much the recipe needs, and advice. "
         "With several trainer nodes, set the total number of ranks by --set trainer.nproc=N"),
        _SIZE,
    ], "pipelinerl validate gsm --gpu-memory 80GiB --parameters 7.6B"),
    "doctor": ("say why a recipe will not learn, or why a run does not", "validate:doctor", [
        ("subject RECIPE|RUN", str, "recipe file or name, or the folder of a run, finished or not"),
        _SET, _ROWS,
        ("--gpu-memory SIZE", str, "memory of a GPU, such as 80GiB, to check that a recipe fits"), _SIZE,
        ("--json", None, "print one JSON object"),
    ], "pipelinerl doctor my.yaml --set trainer.steps=500", "pipelinerl doctor runs/try"),
    "chat": ("talk to a trained policy in the terminal", "chat:chat", [
        *_POLICY,
        ("prompt PROMPT", str, "complete this, or the text on standard input, and end", {"nargs": "?"}),
        ("--system TEXT", str, "system message (default: the recipe's)"),
        ("--temperature T", float, "0 is greedy (default: evaluation.temperature)"),
        ("--max-tokens N", int, "limit of an answer (default: the recipe's, or else 512)"),
    ], "pipelinerl chat runs/try", 'pipelinerl chat runs/try "12+7="      # prints only the completion'),
    "serve": ("serve a trained policy with vLLM and OpenAI's API", "chat:serve", [
        *_POLICY,
        ("--print", None, "print the command of vLLM, and end"),
    ], "pipelinerl serve runs/try --version 20 -- --port 8001"),
    "plan": ("divide accelerators between actors and trainer (estimated; nothing is run)", "plan:plan", [
        _RECIPE, _SET,
        ("--parameters SIZE", str, "model parameters with all experts, such as 7.6B", {"required": True}),
        ("--active-parameters SIZE", str, "parameters that a token uses in a mixture of experts, such as 3.3B (default: from "
         "the model's config.json or name)"),
        ("--accelerators N", int, "number of accelerators to divide", {"required": True}),
        ("--accelerator NAME|FILE", str, "A100, H100, H200, ..., or a JSON file of measured speeds, see docs/planning.md "
         "(default: H100)", {"default": "H100"}),
        ("--lengths BARS|RUN_DIR", str, "completion lengths: either the bars of a histogram, each TOKENS:WEIGHT or "
         "FROM-TO:WEIGHT, such as 1-512:6,513-2048:3,8192:1, or the folder of a run that recorded its lengths",
         {"required": True}),
        ("--sequences-in-progress H", int, "sequences in progress on each actor (default: the number that trains fastest)"),
        ("--kv-kib-per-token KIB", float, "KiB of KV cache per token (default: from config.json, or else assumed)"),
        ("--json", None, "print the plan as one JSON object"),
    ], "pipelinerl plan gsm --parameters 7.6B --accelerators 32 --lengths 1-512:2,513-4096:7,4097-8192:1"),
    "report": ("rebuild report.html of a run", "run_folder:report", [
        ("run_dir RUN_DIR", Path, "folder of a run, finished or not"),
    ], "pipelinerl report runs/try"),
    "replay": ("compute a recorded run's optimizer steps again, and compare the weights", "replay:replay", [
        ("run RUN", Path, "folder of a run with `record: true`, finished or not"),
        ("--from STEP", int, "first step to show (default: the first one)", {"dest": "first"}),
        ("--to STEP", int, "last step (default: the last recorded one)", {"dest": "last"}),
        ("--step STEP", int, "a single step; short for --from STEP --to STEP"),
        ("--tokens", None, "show the tokens of --step instead of its figures"),
        ("--most N", int, "number of sequences that --tokens shows (default: 4)", {"default": 4}),
        ("--set a.b=c", str, "change a field of trainer or algorithm (repeatable), and compare the figures", _OVERRIDES),
    ],
        "pipelinerl replay runs/try                                     # every step, and compare the digests",
        "pipelinerl replay runs/try --from 40 --to 60 --set algorithm.loss=grpo",
        "pipelinerl replay runs/try --step 47 --tokens                  # tokens of the sequences in which π and μ differ most",
    ),
    "rollback": ("let a recorded run continue from one of its earlier versions", "replay:rollback", [
        ("run RUN", Path, "folder of a stopped run with `record: true`"),
        ("--to VERSION", int, "version from which to continue; recomputed from recorded steps if it has no checkpoint",
         {"required": True}),
    ], "pipelinerl rollback runs/try --to 40", "pipelinerl run --resume runs/try"),
    "compare": ("compare runs: recipes, accuracies with intervals, curves, samples", "compare:compare", [
        ("runs RUN", Path, "folders of two or more runs, finished or not", {"nargs": "+"}),
        ("--out FILE", Path, "file of the page (default: compare.html, or none with --csv)"),
        ("--csv FILE|-", Path, "CSV file with all figures, one row per version of each run (- for stdout)"),
        ("--open", None, "open the page in the browser"),
    ], "pipelinerl compare runs/low-rate runs/high-rate --open"),
    "audit": ("recompute a run's ledger from its journal, checkpoints and streams", "run_folder:audit", [
        ("run_dir RUN_DIR", Path, "folder of a current, finished or crashed run"), *_STREAMS,
        ("--json", None, "print one JSON object"),
        ("--versions", None, "list every version, not only unusual ones"),
    ], "pipelinerl audit runs/try --versions"),
    "dead-letters": ("list a run's abandoned prompt groups", "run_folder:dead_letters", [
        ("run_dir RUN_DIR", Path, "folder of a local run, finished or not", {"nargs": "?"}), *_STREAMS,
        ("--run NAME", str, "name of the run on the NATS server", {"default": ""}),
        ("--json", None, "print one JSON object per line, with the whole prompt"),
    ], "pipelinerl dead-letters runs/try --json"),
    "cache": ("list or remove files kept for the next run, such as initial models", "run:cache", [
        ("--clear NAME", str, "remove these entries, or all if none is named; no run may be using them",
         {"nargs": "*", "completer": _kept}),
    ], "pipelinerl cache --clear"),
}  # fmt: skip
"""For each command: its help, its function as `module:function` in `pipelinerl.commands`, its arguments, and examples. The
function returns the exit code, and raises `UserError` for a mistake in the arguments. Each argument is a tuple: name and
placeholder, such as `--run-dir DIR`; type of the value, or None; help; further keywords of argparse. An inner list holds
mutually exclusive arguments."""


if __name__ == "__main__":
    sys.exit(main())

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


def _add(parser: Any, name: str, text: str, kind: Any = None, **more: Any) -> Any:
    """Add an argument by its name and its placeholder, such as `--run-dir DIR`, with its help and the type of its value. An
    option without a placeholder takes no value: it is true if it is given."""
    given, _, metavar = name.partition(" ")
    more |= {"metavar": metavar, "type": kind} if metavar else {"action": "store_true"}
    return parser.add_argument(given, help=text, **more)


def _recipe(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    recipe = _add(parser, "recipe RECIPE", "recipe file, or the name of one under recipes/", nargs=nargs)
    recipe.completer = _recipes
    _set(parser, "override one field of the recipe; the value is YAML (repeatable)").completer = _fields


def _set(parser: argparse.ArgumentParser, text: str) -> Any:
    return _add(parser, "--set a.b=c", text, dest="overrides", action="append", default=[])


def _recipes(prefix: str, **_: Any) -> list[str]:
    from pipelinerl.recipe.loading import known_recipes

    return [*known_recipes(), *glob.glob(f"{prefix}*")]


def _fields(prefix: str, **_rest: Any) -> list[str]:
    from pipelinerl.recipe.fields import Recipe, choices, dotted_paths, field_at

    path, equals, _ = prefix.partition("=")
    if equals and (field := field_at(Recipe, tuple(path.split(".")))):
        return [f"{path}={choice}" for choice in choices(field.annotation)]
    return [f"{path}=" for path in dotted_paths(Recipe)]


def _run(parser: argparse.ArgumentParser) -> None:
    _recipe(parser, nargs="?")
    _add(parser, "--actors N", "number of actor processes; short for --set actor.count=N", int)
    _add(parser, "--run-dir DIR", "folder of the run (default: runs/<name>)", Path)
    _add(parser, "--name NAME", "name of the run (default: <recipe>-<date>-<time>)")
    tried = "number of problems on which each reward is tried before the run starts (default: 2; use 0 if calls cost money)"
    _add(parser, "--reward-rows N", tried, int, default=2)
    page = parser.add_mutually_exclusive_group()
    _add(page, "--page-port PORT", "port of the live page (default: any free one)", int, default=0)
    _add(page, "--no-page", "serve no live page")
    _add(parser, "--resume DIR", "continue the run in DIR with its own recipe; RECIPE and --set may change some fields", Path)
    gpus = "GPUs of each trainer rank and each actor, by UUID or position; a run's placement.json is an example"
    _add(parser, "--placement JSON|FILE", gpus, default="")
    metrics = "port on this machine for the runner's /metrics and for /targets, where Prometheus finds the run's services"
    _add(parser, "--metrics-port PORT", f"{metrics} (default: any free one)", int, default=0)


def _scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["actors"], help="service to scale")
    _add(parser, "count N", "number of actors to reach", int)
    _add(parser, "--run-dir DIR", "folder of the run", Path, required=True)
    _add(parser, "--timeout S", "seconds to wait until all serve (300)", float, default=300.0)


def _submit(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl submit gsm -n rl --values gpus.yaml --set trainer.steps=500 --watch")
    _recipe(parser, nargs="?")
    _namespace(parser)
    _add(parser, "--release NAME", "name of the release and of the run (default: the recipe's name)")
    values = "file with values of the chart, which override those that this command sets (repeatable)"
    _add(parser, "--values FILE", values, Path, action="append", default=[])
    watch = "show the run, fetch its report and checkpoint at its end, and remove the release and its volume claims"
    _add(parser, "--watch", watch)
    _add(parser, "--attach RELEASE", "do as --watch with a release that was submitted before")
    _add(parser, "--keep", "remove nothing after the results were fetched")
    _add(parser, "--output DIR", "folder for the results (default: runs/<name>)", Path)
    _add(parser, "--chart PATH|URL", "folder, archive or oci:// address (default: deploy/helm)")


def _runs(parser: argparse.ArgumentParser) -> None:
    _namespace(parser)
    _add(parser, "--json", "print one JSON array")


def _namespace(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--namespace", metavar="NAMESPACE", required=True, help="namespace in the cluster")
    _add(parser, "--context NAME", "context of the kubeconfig (default: the current one)", default="")


def _validate(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    fields_only = "check only the fields, not the files, folders and functions that they name, which may be on another machine"
    _add(parser, "--fields-only", fields_only)
    values = "values of the chart in deploy/helm, as its validation Job passes them; also check these against the recipe"
    _add(parser, "--chart-values FILE", values, Path)
    tried = "number of problems on which each reward is tried, with the reference answer as completion (default: 20)"
    _add(parser, "--reward-rows N", tried, int, default=20)
    memory = "memory of a GPU, such as 80GiB; also prints how much the recipe needs, with advice. With several trainer nodes,"
    _add(parser, "--gpu-memory SIZE", f"{memory} set the total number of ranks by --set trainer.nproc=N")
    model = "number of the model's parameters, including all experts, such as 7.6B, for --gpu-memory (default: read from the"
    _add(parser, "--parameters SIZE", f"{model} model's files, or else the number in its name plus a tenth)")


def _doctor(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl doctor my.yaml --set trainer.steps=500", "pipelinerl doctor runs/try")
    _add(parser, "subject RECIPE|RUN", "recipe file or name, or the folder of a run, finished or not")
    _set(parser, "override a field")
    _add(parser, "--reward-rows N", "number of problems on which a recipe's rewards are tried (20)", int, default=20)
    _add(parser, "--gpu-memory SIZE", "memory of a GPU, such as 80GiB, to check that a recipe fits")
    _add(parser, "--json", "print one JSON object")


def _policy(parser: argparse.ArgumentParser) -> None:
    _add(parser, "subject RUN|CHECKPOINT", "folder of a run, a checkpoint or an adapter", Path)
    _add(parser, "--version N", "version of the run's policy (default: the newest)", int)


def _chat(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl chat runs/try", 'pipelinerl chat runs/try "12+7="      # prints only the completion')
    _policy(parser)
    _add(parser, "prompt PROMPT", "complete this, or the text on standard input, and end", nargs="?")
    _add(parser, "--system TEXT", "system message (default: the recipe's)")
    _add(parser, "--temperature T", "0 is greedy (default: evaluation.temperature)", float)
    _add(parser, "--max-tokens N", "limit of an answer (default: the recipe's, or else 512)", int)


def _serve(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl serve runs/try --version 20 -- --port 8001")
    _policy(parser)
    _add(parser, "--print", "print the command of vLLM, and end")
    parser.usage = "%(prog)s [-h] [--version N] [--print] RUN|CHECKPOINT [-- ARGUMENT_OF_VLLM ...]"


def _plan(parser: argparse.ArgumentParser) -> None:
    _recipe(parser)
    _add(parser, "--parameters SIZE", "model parameters with all experts, such as 7.6B", required=True)
    active = "parameters that a token uses in a mixture of experts, such as 3.3B (default: by the model's config.json or name)"
    _add(parser, "--active-parameters SIZE", active)
    _add(parser, "--accelerators N", "number of accelerators to divide", int, required=True)
    named = "A100, H100, H200, ..., or a JSON file of measured speeds, see docs/planning.md (default: H100)"
    _add(parser, "--accelerator NAME|FILE", named, default="H100")
    bars = "either the bars of a histogram, each TOKENS:WEIGHT or FROM-TO:WEIGHT, such as 1-512:6,513-2048:3,8192:1"
    lengths = f"completion lengths: {bars}, or the folder of a run that recorded its lengths"
    _add(parser, "--lengths BARS|RUN_DIR", lengths, required=True)
    _add(parser, "--sequences-in-progress H", "sequences on each actor (default: the best)", int)
    _add(parser, "--kv-kib-per-token KIB", "KV cache per token (default: by config.json, or else assumed)", float)
    _add(parser, "--json", "print the plan as one JSON object")


def _report(parser: argparse.ArgumentParser) -> None:
    _add(parser, "run_dir RUN_DIR", "folder of a run, finished or not", Path)


def _compare(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl compare runs/low-rate runs/high-rate --open")
    _add(parser, "runs RUN", "folders of two or more runs, finished or not", Path, nargs="+")
    _add(parser, "--out FILE", "file of the page (default: compare.html, or none with --csv)", Path)
    _add(parser, "--csv FILE|-", "file for a row per step with all figures (- for stdout)", Path)
    _add(parser, "--open", "open the page in the browser")


def _audit(parser: argparse.ArgumentParser) -> None:
    _add(parser, "run_dir RUN_DIR", "folder of a current, finished or crashed run", Path)
    _server(parser)
    _add(parser, "--json", "print one JSON object")
    _add(parser, "--versions", "list every version, not only unusual ones")


def _replay(parser: argparse.ArgumentParser) -> None:
    _example(
        parser,
        "pipelinerl replay runs/try                                      # every step, and compare the digests",
        "pipelinerl replay runs/try --from 40 --to 60 --set algorithm.loss=grpo",
        "pipelinerl replay runs/try --step 47 --tokens                   # tokens of the sequences in which π and μ differ",
    )
    _add(parser, "run RUN", "folder of a run with `record: true`, finished or not", Path)
    _add(parser, "--from STEP", "first step to show (default: the first one)", int, dest="first")
    _add(parser, "--to STEP", "last step (default: the last recorded one)", int, dest="last")
    _add(parser, "--step STEP", "a single step; short for --from STEP --to STEP", int)
    _add(parser, "--tokens", "show the tokens of --step instead of its figures")
    _add(parser, "--most N", "number of sequences that --tokens shows (4)", int, default=4)
    other = "change a field of trainer or algorithm (repeatable); the new figures are shown beside the recorded ones"
    _set(parser, other)


def _rollback(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl rollback runs/try --to 40", "pipelinerl run --resume runs/try")
    _add(parser, "run RUN", "folder of a run with `record: true` that does not run now", Path)
    version = "version from which to continue; without a checkpoint, it is computed from the recorded steps"
    _add(parser, "--to VERSION", version, int, required=True)


def _dead_letters(parser: argparse.ArgumentParser) -> None:
    _add(parser, "run_dir RUN_DIR", "folder of a local run, finished or not", Path, nargs="?")
    _server(parser)
    _add(parser, "--run NAME", "name of the run on the NATS server", default="")
    _add(parser, "--json", "print one JSON object per line, with the whole prompt")


def _server(parser: argparse.ArgumentParser) -> None:
    url = "NATS server of a run on other machines, such as nats://host:4222 (default in a run's pod: the pod's setting)"
    _add(parser, "--nats URL", url, default="")
    _add(parser, "--credentials FILE", "file with user:password, or a .creds file", Path)
    _add(parser, "--tls-dir DIR", "folder with ca.crt, and tls.crt and tls.key if the server requires them", Path)


def _cache(parser: argparse.ArgumentParser) -> None:
    clear = "remove these entries, or all if none is named; keep those of a running run"
    _add(parser, "--clear NAME", clear, nargs="*").completer = _kept


def _listed(parser: argparse.ArgumentParser) -> None:
    _example(parser, "pipelinerl recipes --json | jq '.[] | select(.device == \"cpu\").name'")
    _add(parser, "--json", "print one JSON array")


def _init(parser: argparse.ArgumentParser) -> None:
    _example(
        parser,
        "pipelinerl init my-task                           # ten sums for a small model, with a reward in Python",
        "pipelinerl init my-task --data questions.csv      # your questions, for SmolLM2 or a model of the hub",
        "pipelinerl init my-agent --from agent",
    )
    _add(parser, "folder DIR", "folder to write; it must be new or empty", Path)
    templates = ("gsm8k", "agent", "tools", "environment", "code", "judge")
    begin = "what to begin with: gsm8k, agent, tools, environment, code or judge (default: questions and answers)"
    begins = parser.add_mutually_exclusive_group()
    _add(begins, "--from TEMPLATE", begin, dest="template", choices=templates)
    _add(begins, "--data FILE", "your questions and answers, as CSV, TSV, JSONL, JSON or Parquet", Path)
    _add(parser, "--question COLUMN", "column of --data with the questions (default: a usual name)")
    _add(parser, "--answer COLUMN", "column of --data with the answers (default: a usual name)")


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
execute it. This function returns the exit code, and raises `UserError` for a mistake in the arguments."""


if __name__ == "__main__":
    sys.exit(main())

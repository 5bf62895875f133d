"""Whole runs for tests: a tiny model, a recipe that trains it, and the real `pipelinerl run` in a session of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from pipelinerl.bus.jetstream import connect
from pipelinerl.bus.permissions import ADMIN
from pipelinerl.run_dir import RunDir
from tests.support.machine import usual_open_files

RUN_TIMEOUT_S = 800.0
PARITY_NATS = 1e-4
PROGRAM = str(Path(sys.executable).with_name("pipelinerl"))
CHARACTERS = "0123456789+-=;#"
Command = Callable[..., tuple[int, str, str]]
"""The fixture `pipelinerl`."""


def write_tiny_model(folder: Path) -> None:
    """Random weights, tied embeddings, about 100k parameters, one token per character."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "max_position_embeddings": 128}
    shape |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 2)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = LlamaConfig(vocab_size=len(vocabulary), tie_word_embeddings=True, **shape, **ids)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def write_tiny_recipe(
    model: Path,
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    mode: str = "pipeline",
    tasks: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """A run of a few optimizer steps; `changes` to its sections and fields; `tasks` that differ from its own, in its place. A
    third of its completions go to their limit, so that sequences span versions."""
    recipe: dict[str, Any] = {
        "name": "tiny",
        "mode": mode,
        "model": {"source": "path", "name": str(model), "max_context": 96},
        "task": {
            "name": "chain_sum",
            "config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
            "prompt_style": "compact",
            "heldout_problems": 16,
        },
        "reward": {"answer_pattern": "#(-?[0-9]+)$", "timeout_s": 60},
        "sampling": {"group_size": 4, "max_tokens": 64},
        "actor": {"sequences_in_progress": 16, "engine": {"kv_cache_gib": 0.25}},
        "algorithm": {"max_lag": 4},
        "trainer": {"steps": 8, "batch_size": 16, "learning_rate": 1e-3, "tokens_per_microbatch": 4096},
        "weights": {"chunk_mib": 0.1, "probe_every": 2},
        "evaluation": {"every_steps": 4},
        "checkpoint": {"every_steps": 4},
    }
    for section, fields in (changes or {}).items():
        recipe[section] = {**recipe.get(section, {}), **fields} if isinstance(fields, Mapping) else fields
    if tasks:
        recipe["tasks"] = [{**one, "task": recipe["task"] | one.get("task", {})} for one in tasks]
        del recipe["task"]
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def ledger_adds_up(counts: dict[str, int]) -> bool:
    ended = counts["trained"] + counts["dropped_stale"] + counts["dropped_filtered"] + counts["failed"]
    return counts["issued"] == ended + counts["in_flight"]


def audit(run_dir: Path) -> None:
    """Raises `AssertionError` with the output of `pipelinerl audit` unless everything adds up."""
    done = pipelinerl("audit", str(run_dir))
    assert done.returncode == 0, done.stdout + done.stderr


def replay(run_dir: Path, *options: str) -> str:
    """Compute the recorded steps again. Raises `AssertionError` with the output unless every digest is the run's."""
    done = pipelinerl("replay", str(run_dir), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pipelinerl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)


@dataclass
class RunningCommand:
    """`pipelinerl run` in a session of its own, and the folder it writes to."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        found = []
        with suppress(FileNotFoundError, json.JSONDecodeError):
            found.extend(map(json.loads, path.read_text().splitlines()))
        return found

    def summary(self) -> dict[str, Any]:
        return self.read("summary.json")

    def pids(self) -> dict[str, int]:
        return self.read("pids.json")

    def read(self, name: str) -> dict[str, Any]:
        return json.loads((self.run_dir / name).read_text())

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Fails when the command ends before."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while not condition():
            assert self.process.poll() is None, f"ended before: {what}\n{self.said}"
            assert time.monotonic() < deadline, f"never: {what}\n{self.said}"
            await asyncio.sleep(0.2)

    async def until_step(self, step: int) -> None:
        await self.until(lambda: len(self.metrics()) >= step, f"step {step}")

    async def more_steps(self, count: int = 4) -> None:
        await self.until_step(len(self.metrics()) + count)

    async def until_members(self, count: int) -> None:
        """A version that is offered from now on is served by that many actors."""
        began = len(self.metrics())
        await self.until(
            lambda: any((s["weight_update"] or {}).get("members") == count for s in self.metrics()[began + 1 :]),
            f"a version that {count} actors serve",
        )

    async def next_message(self, kind: str, actor: str) -> None:
        """Waits for the next control message of this kind; those that actors send count if `actor` sent them."""
        server = self.run_dir / "nats" / f"nats-server_{self.pids()['nats']}.ports"
        url = json.loads(server.read_bytes())["nats"][0]
        name = self.said.partition(":")[0]
        own = RunDir(self.run_dir, name).credentials
        login = {"credentials": own.nats(ADMIN), "tls_dir": own.tls_dir}
        async with connect(url, name, name="test", **login) as bus, bus.watch_control([kind]) as messages:
            await anext(messages)  # the last one before
            async for message in messages:
                if message.actor in ("", actor):
                    return

    def kill(self, service: str) -> None:
        """The process of the service and all that it started; some may end by the death of another."""
        first = psutil.Process(self.pids()[service])
        for process in (first, *first.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.kill()

    async def scale(self, actors: int) -> None:
        done = await asyncio.to_thread(pipelinerl, "scale", "actors", str(actors), "--run-dir", str(self.run_dir))
        assert done.returncode == 0, done.stderr + self.said

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, RUN_TIMEOUT_S)

    async def interrupt(self) -> int:
        """Ctrl-C in its terminal."""
        os.killpg(self.process.pid, signal.SIGINT)
        return await self.ended()

    def processes_left(self) -> list[str]:
        """Command lines of processes that work for this run: its folder is in their environment or arguments."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                command = " ".join(process.cmdline())
                if process.pid != os.getpid() and command:
                    told = [command, *process.environ().values()]
                    if any(str(self.run_dir) in one for one in told):
                        found.append(command)
        return found


@contextmanager
def started_run(
    recipe: Path | str, run_dir: Path, *arguments: str, resume: bool = False, environment: Mapping[str, str] | None = None
) -> Iterator[RunningCommand]:
    """`pipelinerl run` on a recipe, or with `resume` on its folder; what is left of it is killed."""
    output = run_dir.with_name(f"{run_dir.name}-{time.monotonic_ns()}.txt")
    where = ["--resume", str(run_dir)] if resume else [str(recipe), "--run-dir", str(run_dir)]
    command = [PROGRAM, "run", *where, *arguments]
    with output.open("wb") as file, usual_open_files():
        env = {**os.environ, **(environment or {})}
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=env)
    running = RunningCommand(process, run_dir, output)
    try:
        yield running
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(60)


def settings(**values: object) -> list[str]:
    """`--set` options; a double underscore stands for the dot: `trainer__steps=8`."""
    return [part for name, value in values.items() for part in ("--set", f"{name.replace('__', '.')}={value}")]

"""A tiny model with a character tokenizer, a recipe that uses it, and runs of the real command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

RUN_TIMEOUT_S = 280.0
CHARACTERS = "0123456789+-=;#"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, tied embeddings, about 100k parameters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<bos>", "<eos>", *CHARACTERS])}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    ).save_pretrained(folder)
    return folder


def tiny_recipe(model: Path, folder: Path) -> Path:
    """A run of a few optimizer steps. A third of its completions go to their limit, so that sequences span versions."""
    path = folder / "tiny.yaml"
    path.write_text(
        yaml.safe_dump(
            {
                "name": "tiny",
                "model": {"source": "path", "name": str(model), "max_context": 96},
                "task": {
                    "name": "chain_sum",
                    "config": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
                    "prompt_style": "compact",
                    "heldout_problems": 16,
                },
                "reward": {"answer_pattern": "#(-?[0-9]+)$"},
                "sampling": {"group_size": 4, "max_tokens": 64},
                "actor": {"sequences_in_progress": 16, "engine": {"kv_cache_gib": 0.25}},
                "algorithm": {"max_lag": 4},
                "trainer": {"steps": 8, "batch_size": 16, "learning_rate": 1e-3, "tokens_per_microbatch": 4096},
                "weights": {"chunk_mib": 0.1, "probe_every": 2},
                "evaluation": {"every_steps": 4},
                "checkpoint": {"every_steps": 4},
            }
        ),
        encoding="utf-8",
    )
    return path


@pytest.fixture
def recipe(tiny_model: Path, tmp_path: Path) -> Path:
    return tiny_recipe(tiny_model, tmp_path)


@dataclass
class RunningCommand:
    """`pipelinerl run` in a session of its own, and the folder it writes to."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path

    def metrics(self) -> list[dict[str, Any]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def pids(self) -> dict[str, int]:
        return json.loads((self.run_dir / "pids.json").read_text())

    def wait(self) -> int:
        return self.process.wait(RUN_TIMEOUT_S)

    def wait_for_steps(self, count: int) -> None:
        """Until so many optimizer steps are recorded; fails when the command ends before."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while len(self.metrics()) < count:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, f"no {count} steps in {RUN_TIMEOUT_S} s: {self.output.read_text()}"
            time.sleep(0.05)

    def processes_left(self) -> list[str]:
        """Command lines of processes that work for this run: its folder is in their environment."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    environment = (entry / "environ").read_bytes()
                    command = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if str(self.run_dir).encode() in environment + command and command:
                    found.append(command.replace(b"\0", b" ").decode(errors="replace"))
        return found


@contextmanager
def started_run(recipe: Path | str, run_dir: Path, *arguments: str, resume: bool = False) -> Iterator[RunningCommand]:
    """`pipelinerl run` on a recipe, or with `resume` on its folder; what is left of it is killed."""
    output = run_dir.with_name(f"{run_dir.name}-{time.monotonic_ns()}.txt")
    program = Path(sys.executable).with_name("pipelinerl")
    where = ["--resume", str(run_dir)] if resume else [str(recipe), "--run-dir", str(run_dir)]
    with output.open("wb") as file:
        process = subprocess.Popen(
            [str(program), "run", *where, *arguments], stdout=file, stderr=file, start_new_session=True
        )
    try:
        yield RunningCommand(process, run_dir, output)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)


@pytest.fixture
def start_run(recipe: Path, tmp_path: Path) -> Iterator[Callable[..., RunningCommand]]:
    """Starts `pipelinerl run` on the tiny recipe, on that named by `of`, or on the folder `resume`; what is left is killed."""
    with ExitStack() as stack:
        numbers = count()

        def start(*arguments: str, of: str = str(recipe), resume: Path | None = None) -> RunningCommand:
            run_dir = resume or tmp_path / f"run{next(numbers)}"
            return stack.enter_context(started_run(of, run_dir, *arguments, resume=resume is not None))

        yield start

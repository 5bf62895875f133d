"""Log lines of an actor's engine processes have the form of the actor's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROCESS = """
import logging, sys
import torch, transformers
from services.actor.weight_sync.plugin import log_as_the_actor
log_as_the_actor()
logging.getLogger(sys.argv[1]).warning("the engine is up")
"""
ACTOR = {"RUN": "gsm", "RECIPE": "recipe.yaml", "INSTANCE": "actor-1", "VERIFIER": "v:1", "LOG_FORMAT": "json"}


def said(logger: str, **environment: str) -> str:
    """What a new process of vLLM prints when `logger` says something."""
    settings = {f"PIPELINERL_{name}": value for name, value in ACTOR.items()}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIPELINERL_", "VLLM_"))}
    command = [sys.executable, "-c", PROCESS, logger]
    return subprocess.run(command, env={**inherited, **settings, **environment}, capture_output=True, text=True).stderr


@pytest.mark.parametrize("logger", ["vllm.v1.engine.core", "torch.distributed.fsdp", "transformers.modeling_utils"])
def test_an_engine_process_writes_lines_as_its_actor_does(logger: str) -> None:
    line = json.loads(said(logger, VLLM_CONFIGURE_LOGGING="0"))
    about = {key: line[key] for key in ("run", "service", "instance", "logger", "message")}
    assert about == {
        "run": "gsm",
        "service": "actor",
        "instance": "actor-1",
        "logger": logger,
        "message": "the engine is up",
    }


def test_who_wants_vllms_own_lines_keeps_them() -> None:
    assert said("vllm.v1.engine.core", VLLM_CONFIGURE_LOGGING="1") == "the engine is up\n"  # Python's own last resort

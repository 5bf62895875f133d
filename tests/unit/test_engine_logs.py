"""Log lines of an actor's engine processes have the form of the actor's own."""

import json
import os
import subprocess
import sys

PROCESS = """
import logging, sys
from services.actor.weight_sync.plugin import log_as_the_actor
log_as_the_actor()
for logger in sys.argv[1:]:
    logging.getLogger(logger).warning("the engine is up")
"""
LIBRARIES = "import torch, transformers  # they set up logs of their own\n"
LOGGERS = ["vllm.v1.engine.core", "torch.distributed.fsdp", "transformers.modeling_utils"]
ACTOR = {"RUN": "gsm", "RECIPE": "recipe.yaml", "INSTANCE": "actor-1", "VERIFIER": "v:1", "LOG_FORMAT": "json"}


def said(program: str, *loggers: str, **environment: str) -> list[str]:
    settings = {f"PIPELINERL_{name}": value for name, value in ACTOR.items()}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PIPELINERL_", "VLLM_"))}
    ran = subprocess.run(
        [sys.executable, "-c", program, *loggers], env={**inherited, **settings, **environment}, capture_output=True, text=True
    )
    return ran.stderr.splitlines()


def test_an_engine_process_writes_lines_as_its_actor_does() -> None:
    lines = [json.loads(line) for line in said(LIBRARIES + PROCESS, *LOGGERS, VLLM_CONFIGURE_LOGGING="0")]
    about = {"run": "gsm", "service": "actor", "instance": "actor-1", "message": "the engine is up"}
    assert [line["logger"] for line in lines] == LOGGERS
    assert all(about.items() <= line.items() for line in lines)


def test_who_wants_vllms_own_lines_keeps_them() -> None:
    assert said(PROCESS, LOGGERS[0], VLLM_CONFIGURE_LOGGING="1") == ["the engine is up"]  # Python's own last resort

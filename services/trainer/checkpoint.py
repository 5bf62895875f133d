"""Hugging Face export of the policy: safetensors and tokenizer, loadable by transformers and by `vllm serve`.

Atomic: a folder is written beside its final name and renamed, so that a crash leaves the previous checkpoint. It holds the
policy only: neither optimizer state nor ledger, so a run cannot go on from it.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def export_policy(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, info: dict[str, Any]
) -> Path:
    """Writes `folder` (replacing what is there) with the model, the tokenizer and `info` as pipelinerl.json."""
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    model.save_pretrained(partial, safe_serialization=True)
    tokenizer.save_pretrained(partial)
    (partial / "pipelinerl.json").write_text(json.dumps(info, indent=2) + "\n", encoding="utf-8")
    replaced = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)
    return folder


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints `step-<number>` of `folder`."""
    steps = sorted(folder.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
    for path in steps[:-keep]:
        shutil.rmtree(path, ignore_errors=True)

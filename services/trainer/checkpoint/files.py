"""Files that are on disk, whole, or not there: written beside their name, fsynced, renamed. No format of its own.

Folders of checkpoints: replaced as a whole, or not at all, whatever crashes; and two files in them.

A folder is written beside its final name and renamed. Not here: what fills it (`export.py`, `resume/`).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelinerl.errors import FieldError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from services.trainer.learn.policy import TokenScorer


def write_durably(path: Path, data: bytes) -> None:
    """Replaces `path` at once; a crash leaves the old one or the new one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync_folder(path.parent)


def write_json_durably(path: Path, value: Mapping[str, Any]) -> None:
    write_durably(path, json.dumps(value).encode() + b"\n")


def sync_folder(folder: Path) -> None:
    """Names in `folder` that were made or changed are on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Every file and folder in `folder`, and itself."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    sync_folder(folder)


VALUE_HEAD = Path("value_head") / "model.safetensors"
"""Within a checkpoint. In a folder of its own: vLLM takes every safetensors file beside the model for a part of it."""
_PARTIAL, _REPLACED = ".partial-", ".old-"


def save_value_head(weights: Mapping[str, Tensor], file: Path) -> None:
    """`weights`: `weight` [1, hidden size] and `bias` [1]."""
    from safetensors.torch import save_file

    file.parent.mkdir(exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, file)


def load_value_head(scorer: TokenScorer, folder: Path) -> bool:
    """Gives `scorer`'s value head the weights in a checkpoint's `folder`; False where there are none.

    Raises `FieldError` for weights of another shape.
    """
    from safetensors.torch import load_file

    if not (folder / VALUE_HEAD).is_file() or scorer.value_head is None:
        return False
    try:
        scorer.value_head.load_state_dict(load_file(folder / VALUE_HEAD))
    except RuntimeError as error:
        raise FieldError("model.name", str(folder), f"its {VALUE_HEAD} is not this model's: {error}") from error
    return True


def save_adapter(model: PreTrainedModel, adapter: Mapping[str, Tensor], folder: Path) -> None:
    """Writes what `PeftModel.from_pretrained` reads: `adapter` as `adapter_weights` names it, and how it was made."""
    from safetensors.torch import save_file

    from services.trainer.learn.lora import peft_config

    folder.mkdir()
    peft_config(model).save_pretrained(str(folder))
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def partial_folder(folder: Path) -> Path:
    """Where what is to become `folder` is written; `tidy` knows it."""
    return folder.with_name(f".{folder.name}{_PARTIAL}{os.getpid()}")


def put_in_place(partial: Path, folder: Path) -> None:
    """Renames; what `folder` was before is gone then."""
    replaced = folder.with_name(f".{folder.name}{_REPLACED}{os.getpid()}")
    if folder.exists():
        os.replace(folder, replaced)
    os.replace(partial, folder)
    shutil.rmtree(replaced, ignore_errors=True)


def tidy(parent: Path) -> None:
    """After a process that was killed while it wrote a checkpoint into `parent`: the previous one back, halves away."""
    for replaced in parent.glob(f".*{_REPLACED}*"):
        folder = parent / replaced.name[1:].partition(_REPLACED)[0]
        if not folder.exists():
            os.replace(replaced, folder)
    for path in (*parent.glob(f".*{_PARTIAL}*"), *parent.glob(f".*{_REPLACED}*")):
        shutil.rmtree(path, ignore_errors=True)


def prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints of `folder`."""
    for path in step_folders(folder)[:-keep]:
        shutil.rmtree(path, ignore_errors=True)


def step_folders(folder: Path) -> list[Path]:
    """Checkpoints `step-<version>` in `folder`, by version."""
    found = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))

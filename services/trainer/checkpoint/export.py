"""Hugging Face export of the policy in two halves: staged in host memory while training waits, written while it continues.

The parts of a model that transformers reads when it writes one (class, configuration, ties, conversions) are kept in a second
model of the same form without memory, so that the writing thread touches nothing that a step changes. Renaming, pruning and
syncing files are done elsewhere.
"""

from __future__ import annotations

import copy
import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelinerl.errors import FieldError
from services.trainer.distributed.world import ADAPTER, VALUE_HEAD, WEIGHTS
from services.trainer.learn.lora import has_adapters, peft_config
from services.trainer.learn.policy import Policy

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from services.trainer.learn.step import Learner

VALUE_HEAD_FILE = Path("value_head") / "model.safetensors"
"""Path within a checkpoint. It is in a separate folder because vLLM takes every safetensors file beside the model for a part of
it."""
_KEPT = ("generation_config", "_weight_conversions", "peft_config")
"""Attributes of a model, beside its class and configuration, from which files are made."""


class PolicyExport:
    """Exports a policy. `dtype`: dtype of the weights in the files. Each `stage` reuses the memory of the previous one, which
    must already be written."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            self.form: PreTrainedModel = type(model)(copy.deepcopy(model.config))  # without its adapters
        self.form.to(dtype)  # type: ignore[arg-type]
        for name in _KEPT:
            if (value := getattr(model, name, None)) is not None:
                setattr(self.form, name, copy.deepcopy(value))
        self._tokenizer, self._dtype = tokenizer, dtype
        self.staged: dict[str, dict[str, Tensor]] = {}
        """One version in host memory: `WEIGHTS`, and `VALUE_HEAD` and `ADAPTER` if it has them, by the names in the files."""

    @torch.no_grad()
    def stage(self, learner: Learner) -> None:
        """Gather the tensors that actors would load. Blocks, on the thread that computes; all ranks take part."""
        there = {WEIGHTS: True, VALUE_HEAD: learner.policy.value_head is not None, ADAPTER: has_adapters(self.form)}
        for kind in (kind for kind, has in there.items() if has):
            copies = self.staged.setdefault(kind, {})
            for name, tensor in learner.gather(kind):
                if name not in copies:
                    dtype = self._dtype if kind == WEIGHTS else tensor.dtype
                    copies[name] = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
                copies[name].copy_(tensor, non_blocking=True)
        device = learner.policy.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def write(self, folder: Path, info: Mapping[str, Any]) -> None:
        """Write model, tokenizer, and `info` as pipelinerl.json into the existing `folder`, on any thread, beside training."""
        self.form.save_pretrained(folder, state_dict=self.staged[WEIGHTS], safe_serialization=True)
        self._tokenizer.save_pretrained(folder)
        if VALUE_HEAD in self.staged:
            save_value_head(self.staged[VALUE_HEAD], folder / VALUE_HEAD_FILE)
        if ADAPTER in self.staged:  # files for `PeftModel.from_pretrained`: the factors and their configuration
            (folder / "adapter").mkdir()
            peft_config(self.form).save_pretrained(str(folder / "adapter"))
            named = {f"base_model.model.{name}": tensor for name, tensor in self.staged[ADAPTER].items()}
            save_file(named, folder / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
        about = folder / "pipelinerl.json"
        about.write_text(json.dumps(dict(info), indent=2) + "\n", encoding="utf-8")
        mode = stat.S_IMODE(about.stat().st_mode)
        for file in folder.rglob("*"):  # safetensors files are made readable only by their owner, despite the umask
            if file.is_file():
                file.chmod(mode)


def save_value_head(weights: Mapping[str, Tensor], file: Path) -> None:
    """Write `weights`: `weight` [1, hidden size] and `bias` [1]."""
    file.parent.mkdir(exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, file)


def load_value_head(policy: Policy, folder: Path) -> bool:
    """Load the weights in a checkpoint's `folder` into `policy`'s value head; False if there are none. Raises `FieldError` for
    weights of another shape."""
    if not (folder / VALUE_HEAD_FILE).is_file() or policy.value_head is None:
        return False
    try:
        policy.value_head.load_state_dict(load_file(folder / VALUE_HEAD_FILE))
    except RuntimeError as error:
        raise FieldError("model.name", str(folder), f"its {VALUE_HEAD_FILE} is not this model's: {error}") from error
    return True

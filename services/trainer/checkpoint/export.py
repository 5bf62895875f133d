"""Hugging Face export of the policy in two halves: staged in host memory while training waits, written while it goes on.

What transformers reads of a model when it writes one (class, configuration, ties, conversions) is kept apart from the one that
trains, in a model of the same form without memory: a thread that writes touches nothing that a step changes. Not here:
renaming, pruning, and bringing files onto the disk.
"""

from __future__ import annotations

import copy
import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipelinerl.errors import FieldError
from services.trainer.learn.lora import has_adapters, peft_config
from services.trainer.learn.policy import TokenScorer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from services.trainer.policy_trainer import RankZero

VALUE_HEAD = Path("value_head") / "model.safetensors"
"""Within a checkpoint. In a folder of its own: vLLM takes every safetensors file beside the model for a part of it."""
_KEPT = ("generation_config", "_weight_conversions", "peft_config")
"""What a model has beside its class and configuration that files are made of."""


@dataclass(frozen=True, eq=False)
class StagedExport:
    """Of one version, in host memory; by the names of files."""

    weights: Mapping[str, Tensor]
    value_head: Mapping[str, Tensor]
    """Empty without one."""
    adapter: Mapping[str, Tensor] | None


class PolicyExport:
    """`dtype`: of the weights in the files. Each `stage` takes the memory of the one before, which must be written."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
        self.form = form_of(model, dtype)
        self._tokenizer, self._dtype = tokenizer, dtype
        self._memory: dict[str, Tensor] = {}

    def stage(self, rank_zero: RankZero) -> StagedExport:
        """Gathers what actors would load. Blocks, on the thread that computes; all ranks take part."""
        staged = StagedExport(
            weights=self._copied("weights", rank_zero.weights(), self._dtype),
            value_head=self._copied("value head", rank_zero.value_head().items()),
            adapter=self._copied("adapter", rank_zero.adapter()) if has_adapters(self.form) else None,
        )
        device = rank_zero.learner.policy.device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
        return staged

    def write(self, staged: StagedExport, folder: Path, info: Mapping[str, Any]) -> None:
        """Into `folder`, which is there: model, tokenizer, `info` as pipelinerl.json. On any thread, beside training."""
        self.form.save_pretrained(folder, state_dict=dict(staged.weights), safe_serialization=True)
        self._tokenizer.save_pretrained(folder)
        if staged.value_head:
            save_value_head(staged.value_head, folder / VALUE_HEAD)
        if staged.adapter is not None:
            save_adapter(self.form, staged.adapter, folder / "adapter")
        about = folder / "pipelinerl.json"
        about.write_text(json.dumps(dict(info), indent=2) + "\n", encoding="utf-8")
        give_mode(folder, about.stat().st_mode)

    def _copied(
        self, kind: str, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        return {name: self._copy(f"{kind}/{name}", tensor, dtype or tensor.dtype) for name, tensor in tensors}

    @torch.no_grad()
    def _copy(self, key: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if key not in self._memory:
            self._memory[key] = torch.empty(tensor.shape, dtype=dtype, pin_memory=tensor.is_cuda)
        return self._memory[key].copy_(tensor, non_blocking=True)


def form_of(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """A model without memory that is saved as `model` is, given weights in `dtype`. Its adapters are told of, and not in it."""
    with torch.device("meta"):
        form: PreTrainedModel = type(model)(copy.deepcopy(model.config))
    form.to(dtype)  # type: ignore[arg-type]
    for name in _KEPT:
        if (value := getattr(model, name, None)) is not None:
            setattr(form, name, copy.deepcopy(value))
    return form


def give_mode(folder: Path, mode: int) -> None:
    """To every file: safetensors are written readable by their owner alone, whatever the umask."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.chmod(stat.S_IMODE(mode))


def save_value_head(weights: Mapping[str, Tensor], file: Path) -> None:
    """`weights`: `weight` [1, hidden size] and `bias` [1]."""
    file.parent.mkdir(exist_ok=True)
    save_file({name: tensor.cpu().contiguous() for name, tensor in weights.items()}, file)


def load_value_head(scorer: TokenScorer, folder: Path) -> bool:
    """Gives `scorer`'s value head the weights in a checkpoint's `folder`; False where there are none.

    Raises `FieldError` for weights of another shape.
    """
    if not (folder / VALUE_HEAD).is_file() or scorer.value_head is None:
        return False
    try:
        scorer.value_head.load_state_dict(load_file(folder / VALUE_HEAD))
    except RuntimeError as error:
        raise FieldError("model.name", str(folder), f"its {VALUE_HEAD} is not this model's: {error}") from error
    return True


def save_adapter(model: PreTrainedModel, adapter: Mapping[str, Tensor], folder: Path) -> None:
    """Writes what `PeftModel.from_pretrained` reads: `adapter` as `adapter_weights` names it, and how it was made."""
    folder.mkdir()
    peft_config(model).save_pretrained(str(folder))
    named = {f"base_model.model.{name}": tensor.contiguous() for name, tensor in adapter.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})

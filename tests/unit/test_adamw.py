"""AdamW: which one a recipe gets, and what its steps do."""

from __future__ import annotations

import builtins
from typing import Any

import pytest
from torch import nn

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import TrainerConfig
from services.trainer.learn.optimizer import build_adamw


def groups() -> list[dict[str, Any]]:
    return [{"params": [nn.Linear(2, 2).weight], "weight_decay": 0.0}]


def test_without_torchao_the_field_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torchao") or name == "services.trainer.learn.adamw_8bit":
            raise ImportError("No module named 'torchao'")
        return whole(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FieldError, match=r"needs torchao, which does not import here \(No module named 'torchao'\)"):
        build_adamw(groups(), TrainerConfig(optimizer="adamw_8bit"))
    build_adamw(groups(), TrainerConfig(optimizer="adamw"))

"""Compiled decoder layers: the same gradients, the same names, and a clear error where nothing can be compiled."""

import copy
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.exc import InvalidCxxCompiler
from transformers import PreTrainedModel

from pipelinerl.errors import FieldError
from pipelinerl.recipe.fields import AlgorithmConfig
from pipelinerl.service.settings import RankSettings
from services.trainer.learn.model import compile_policy, decoder_layers, frozen_copy, wrap_model
from services.trainer.loading import load_learner
from tests.support.learner import LENGTHS, assert_same, group_of, model_of, packed_gradients, sequences_of
from tests.unit.builders import make_recipe
from tests.unit.ranks import on_ranks
from tests.unit.test_ranks import SHORT, Job, same, train, train_all

CXX = os.environ.get("CXX", "g++")
needs_compiler = pytest.mark.skipif(shutil.which(CXX) is None, reason=f"no C++ compiler ({CXX}) on this machine")


def is_compiled(model: PreTrainedModel) -> list[bool]:
    return [layer._compiled_call_impl is not None for layer in decoder_layers(model)]


@needs_compiler
def test_compiled_layers_have_the_same_gradients_and_scoring_compiles_nothing() -> None:
    """Recomputed activations, rows of several lengths, and a reference policy: an uncompiled copy of a compiled one."""
    torch.compiler.reset()
    config = AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.01)
    eager = wrap_model(model_of("llama-tied"))
    compiled = wrap_model(model_of("llama-tied"), gradient_checkpointing=True)
    compile_policy(compiled, torch.device("cpu"))
    compiled.max_logits = 400  # more than one block of words
    tokens = np.arange(12, dtype=np.int32)
    before = counters["stats"]["unique_graphs"]
    assert compiled.sequence_logprobs(tokens) == pytest.approx(eager.sequence_logprobs(tokens), abs=1e-6)
    assert counters["stats"]["unique_graphs"] == before
    group = group_of(sequences_of(LENGTHS))
    expected, found = (packed_gradients(one, group, config, 40, reference=frozen_copy(one)) for one in (eager, compiled))
    assert_same(expected, found)
    assert counters["stats"]["unique_graphs"] > before, "the count does not tell"


@needs_compiler
def test_a_loaded_policy_is_compiled_in_place(tmp_path: Path) -> None:
    model_of("qwen2-tied").save_pretrained(tmp_path)
    recipes = (make_recipe(trainer={"compile": wanted}) for wanted in (False, True))
    plain, compiled = (load_learner(one, str(tmp_path), RankSettings()).policy.model for one in recipes)
    assert (is_compiled(plain), is_compiled(compiled)) == ([False, False], [True, True])
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert is_compiled(copy.deepcopy(compiled)) == [False, False]


def test_without_a_compiler_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise InvalidCxxCompiler

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(FieldError, match=r"trainer\.compile = True: torch\.compile needs a C\+\+ compiler .*No working"):
        compile_policy(wrap_model(model_of("llama-tied")), torch.device("cpu"))


@pytest.mark.soak
@needs_compiler
def test_compiled_ranks_train_as_one_that_is_not(tmp_path: Path) -> None:
    model_of("llama-tied", max_position_embeddings=64).save_pretrained(tmp_path)
    plain = Job(str(tmp_path), trainer={"gradient_checkpointing": True}, lengths=tuple(SHORT))
    compiled = replace(plain, trainer={**plain.trainer, "compile": True, "context_parallel": 2})
    one = train(load_learner(plain.recipe(), plain.folder, RankSettings()), plain)
    two = on_ranks(2, train_all, {"compiled": compiled}, wait_s=280.0)[0]["compiled"]
    assert one is not None
    same(one, two)

"""The models and batches on which the trainer is compared with a bare loop, on a CPU. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.random_models import smollm2_config, tiny_config
from benchmarks.training_data import make_groups, uniform_lengths
from pipelinerl.recipe.fields import TrainerConfig
from pipelinerl.recipe.loading import load_recipe
from services.trainer.learn.batch import TrainingGroup


@dataclass(frozen=True)
class Case:
    """One model and one batch. Lengths are of whole sequences, uniform, both ends included."""

    name: str
    model: str
    """Of `MODELS`."""
    goal: float
    batch_size: int
    lengths: tuple[int, int]
    tokens_per_microbatch: int
    ranks: int = 1
    with_mask: bool = False
    """Whether the loop with transformers' own mask is timed too."""

    def build_model(self) -> PreTrainedModel:
        return MODELS[self.model]()

    def groups(self, vocabulary: int) -> list[TrainingGroup]:
        return make_groups(uniform_lengths(*self.lengths, self.batch_size), vocabulary)

    def trainer(self) -> TrainerConfig:
        return TrainerConfig(tokens_per_microbatch=self.tokens_per_microbatch, learning_rate=1e-6)


def tiny_model() -> PreTrainedModel:
    """That of `arithmetic`, with random weights."""
    return LlamaForCausalLM(tiny_config(load_recipe("arithmetic")))


def smollm2_model() -> PreTrainedModel:
    """SmolLM2-135M's shape with random weights, which cost the same."""
    return LlamaForCausalLM(smollm2_config())


MODELS: dict[str, Callable[[], PreTrainedModel]] = {"tiny": tiny_model, "smollm2": smollm2_model}

CASES = {
    case.name: case
    for case in (
        Case("tiny", "tiny", 0.97, 256, (15, 60), 2048, with_mask=True),
        Case("smollm2", "smollm2", 0.97, 8, (15, 60), 512),
        Case("tiny-2-ranks", "tiny", 0.97, 256, (15, 60), 2048, ranks=2),
        Case("smollm2-2-ranks", "smollm2", 0.97, 8, (15, 60), 512, ranks=2),
    )
}

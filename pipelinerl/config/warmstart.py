"""The recipe section `model.warmstart`: a small Llama with a character tokenizer, and the demonstrations it learns from.

The section says what to build; `services.trainer.warmstart` builds it. It holds nothing of the task itself but
`task_config`, and nothing of reinforcement learning.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

Probability = Annotated[float, Field(ge=0, le=1)]


class WarmStartConfig(BaseModel):
    """Architecture, demonstrations, supervised training. The context length is `model.max_context`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    hidden_size: int = Field(128, ge=32, le=2048, description="Width of the residual stream.")
    num_layers: int = Field(2, ge=1, le=32, description="Transformer layers.")
    num_heads: int = Field(4, ge=1, le=64, description="Attention heads; as many key-value heads.")
    head_dim: int = Field(32, ge=32, le=256, description="Width of a head; vLLM on CPU takes 32, 64, 96, 128, ...")
    intermediate_size: int = Field(384, ge=32, le=16384, description="Width of the feed-forward layer.")
    tie_embeddings: bool = Field(False, description="Use the input embedding as the output layer too.")
    initializer_std: float = Field(0.06, gt=0, le=1, description="Standard deviation of the initial matrices.")

    task_config: dict[str, Any] = Field(
        default_factory=dict,
        description="Changes to task.config for the demonstrations only, such as shorter problems.",
    )
    careful: tuple[Probability, ...] = Field(
        (0.4, 0.35, 0.3, 0.25),
        min_length=1,
        strict=False,  # YAML and JSON have lists only
        description="Probability that a demonstration writes out the 1st, 2nd, ... partial sum instead of hurrying on to the "
        "next term; the last one holds for all further terms.",
    )
    careful_in_lessons: Probability = Field(
        0.75, description="The same probability, for all terms, in the lessons that come first."
    )
    lessons: Probability = Field(
        0.85, description="Share of the steps that are lessons; the habit of `careful` follows."
    )

    steps: int = Field(600, ge=1, le=1_000_000, description="Optimizer steps of supervised training.")
    batch_size: int = Field(64, ge=1, le=65_536, description="Demonstrations per optimizer step.")
    learning_rate: float = Field(3e-3, gt=0, le=1, description="AdamW: embedding, output layer, norms.")
    matrix_learning_rate: float = Field(0.02, gt=0, le=1, description="Muon: matrices of the layers.")
    warmup_steps: int = Field(40, ge=0, description="Steps of linear warm-up; a cosine down to 3% follows.")
    max_grad_norm: float = Field(1.0, gt=0, description="Gradient clipping.")
    seed: int = Field(0, ge=0, le=2**31 - 1, description="Of the initial weights and the demonstrations.")

    @field_validator("head_dim")
    @classmethod
    def _head_dim(cls, value: int) -> int:
        if value % 32:
            raise ValueError("use a multiple of 32: vLLM on CPU takes no other")
        return value

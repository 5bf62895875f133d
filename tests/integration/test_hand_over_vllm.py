"""Two vLLM actors, the first one stopped in the middle of its completions; what the second stores, scored by transformers.

They serve different weights, so that a token's log-probability says which of them sampled it.
"""

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from benchmarks.small_models.supervised import character_tokenizer
from pipelinerl.bus.protocol import group_id_of
from pipelinerl.messages.sequences import Sequence
from tests.support.actor_stage import PROMPT, actor_stage
from tests.support.parity import TOLERANCE, change_strongly, engine_recipe, largest_difference, random_model, reference

GROUPS, SAMPLES, MAX_TOKENS, STOP_AT = 2, 4, 220, 24
"""Long, so that the first actor, which looks every few milliseconds for one of `STOP_AT` tokens, finds one under way."""


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    character_tokenizer(64).save_pretrained(folder)
    return folder


def written_recipe(folder: Path) -> Path:
    recipe = folder / "recipe.yaml"
    recipe.write_text(engine_recipe(folder, max_context=256).model_dump_json(exclude_defaults=True))  # JSON is YAML
    return recipe


def scored(model: PreTrainedModel, sequence: Sequence) -> list[float]:
    """log π of each completion token."""
    tokens = [*sequence.prompt_token_ids.tolist(), *sequence.completion_token_ids.tolist()]
    return reference(model, tokens)[len(PROMPT) - 1 :]


@pytest.mark.engine
async def test_a_sequence_begun_by_one_engine_is_finished_by_another(tmp_path: Path) -> None:
    first_model, second_model = random_model("llama", tied=True), random_model("llama", tied=True)
    change_strongly(second_model, seed=2)
    folders = [saved(first_model, tmp_path / "first"), saved(second_model, tmp_path / "second")]
    async with actor_stage(tmp_path, written_recipe(tmp_path)) as one:
        await one.issue(*range(GROUPS), num_samples=SAMPLES, max_tokens=MAX_TOKENS)
        go = tmp_path / "go"
        first = await one.start("first", model_dir=str(folders[0]), version=1, stop_at_tokens=STOP_AT)
        await one.start("second", model_dir=str(folders[1]), version=2, serve_after=str(go))
        assert await first.exit_code() == 0, first.log.read_text()[-3000:]
        assert all(group_id_of(msg_id) != msg_id for msg_id in await one.bus.pending_prompts())
        go.touch()
        sequences = await one.stored(GROUPS * SAMPLES)
        await one.all_acknowledged()

    assert len({sequence.sequence_id for sequence in sequences}) == GROUPS * SAMPLES
    continued = [sequence for sequence in sequences if len(sequence.spans) == 2]
    assert continued, [sequence.spans for sequence in sequences]
    for sequence in sequences:
        assert not sequence.failure
        by_version = {1: scored(first_model, sequence), 2: scored(second_model, sequence)}
        for span in sequence.spans:
            measured = sequence.behaviour_logprobs[span.start : span.end].tolist()
            assert largest_difference(measured, by_version[span.version][span.start : span.end]) < TOLERANCE
            other = by_version[3 - span.version][span.start : span.end]
            assert span.end - span.start < 4 or largest_difference(measured, other) > 100 * TOLERANCE
    for sequence in continued:
        begun, rest = sequence.spans
        assert (begun.version, rest.version, sequence.actor) == (1, 2, "second")
        assert begun.end >= STOP_AT // 2
        assert len(sequence.completion_token_ids) <= MAX_TOKENS
        assert np.isfinite(sequence.behaviour_logprobs).all()

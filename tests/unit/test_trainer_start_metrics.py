"""What a trainer that goes on exports at its start: counters of its own, and of checkpoints what there is."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.rl.lag import FIRST_INCARNATION
from services.trainer.checkpoint.run_state import Start
from tests.unit.builders import make_group, make_sequence
from tests.unit.test_trainer_stop import training_run


async def test_tokens_that_arrived_before_this_start_are_not_in_its_counter(tmp_path: Path) -> None:
    async with training_run(tmp_path) as (run, _):
        run._intake.tokens_arrived = 1000  # of the checkpoint that it goes on from
        group = make_group(900)
        run._tracker.issue(group)
        sequence = make_sequence(group, 0, completion=(1, 2, 3))
        await run._intake._add(sequence)
        registry = run._recorder._metrics.registry
        assert registry.get_sample_value("pipelinerl_trainer_tokens_arrived_total") == 3
        assert run._intake.tokens_arrived == 1003, "what the run's records go on from"


async def test_a_trainer_that_starts_again_without_a_checkpoint_has_none_to_show(tmp_path: Path) -> None:
    again = Start(FIRST_INCARNATION.restarted(0), again=True)
    async with training_run(tmp_path, start=again) as (run, _):
        assert run._recorder._metrics.registry.get_sample_value("pipelinerl_trainer_checkpoint_version") is None

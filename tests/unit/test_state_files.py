"""State on disk: what was staged and nothing later, whole or refused, and a disk that is full ends no training."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelinerl.errors import FieldError, ServiceError
from pipelinerl.recipe.fields import AlgorithmConfig, LoraConfig, TrainerConfig
from services.trainer.checkpoint.state_files import StateSaver, learner_state, local_part, restore, stage, write_state
from services.trainer.learn.lora import add_adapters
from services.trainer.learn.model import wrap_model
from services.trainer.learn.step import Learner
from services.trainer.loading import sharded_learner
from services.trainer.worker import worker_loop
from services.trainer.world import END, join_ranks, leave_ranks
from tests.support.learner import LENGTHS, group_of, model_of, sequences_of
from tests.unit.ranks import Job, on_ranks, saved_beside

GROUP = group_of(sequences_of(LENGTHS))


def learner(seed: int = 0, dtype: torch.dtype = torch.float32, lora: LoraConfig | None = None, **shape: Any) -> Learner:
    model = model_of("qwen2-tied", seed, **shape).to(dtype)
    if lora is not None:
        add_adapters(model, lora)
    return Learner(wrap_model(model), AlgorithmConfig(), TrainerConfig(learning_rate=1e-2, lora=lora))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(value, right[name]) for name, value in left.items())


def written(path: Path) -> Path:
    one = learner()
    one.step(one.prepare([GROUP], 0))
    write_state(stage(one), path, None)
    return path


def test_a_learner_that_was_never_stepped_comes_back_as_new(tmp_path: Path) -> None:
    one, other = learner(), learner(seed=1)
    write_state(stage(one), tmp_path / "state", None)
    restore(other, tmp_path / "state")
    for stepped in (one, other):
        stepped.step(stepped.prepare([GROUP], 0))
    assert same(learner_state(one), learner_state(other))


def test_what_is_stored_has_its_name_and_is_float32() -> None:
    staged = stage(learner(dtype=torch.bfloat16, num_hidden_layers=1))
    layer = "model.model.layers.0.mlp.up_proj.weight"
    assert {f"{kind}/{layer}" for kind in ("weight", "exp_avg", "exp_avg_sq", "step")} <= staged.keys()
    assert {"steps_taken", "rng/cpu/0"} <= staged.keys()
    assert {tensor.dtype for name, tensor in staged.items() if "/model." in name} == {torch.float32}
    assert "weight/model.lm_head.weight" not in staged, "tied weights are stored once"
    adapters = stage(learner(lora=LoraConfig(rank=2)))
    assert all(".lora_" in name for name in adapters if name.startswith("weight/"))


def test_staging_again_takes_the_same_memory(tmp_path: Path) -> None:
    one = learner()
    saver, addresses = StateSaver(one), []
    for version in range(2):
        saver.stage()
        addresses.append({name: local_part(tensor).data_ptr() for name, tensor in saver.staged.items()})
        saver.write(tmp_path / str(version))
        one.step(one.prepare([GROUP], version))
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"intermediate_size": 40}, r"weight/model\.model\.layers\.0\.mlp\.\w+\.weight of shape \[48, 32\]"),
        ({"num_hidden_layers": 3}, r"has no weight/model\.model\.layers\.2\.\S+, which the recipe's model has"),
        ({"num_hidden_layers": 1}, r"has weight/model\.model\.layers\.1\.\S+, which the recipe's model lacks"),
        ({"lora": LoraConfig(rank=2)}, r"has no weight/\S+lora_A\S+, which"),
    ],
)
def test_a_state_of_another_model_is_refused_by_its_first_weight(tmp_path: Path, other: dict[str, Any], told: str) -> None:
    folder = written(tmp_path / "state")
    with pytest.raises(FieldError, match=told) as raised:
        restore(learner(**other), folder)
    assert str(folder)[:40] in str(raised.value)


@pytest.mark.parametrize(
    ("name", "keep", "told"),
    [(".metadata", 100, ""), ("__0_0.distcp", 5000, ""), ("__0_0.distcp", 0, ""), ("__0_0.distcp", None, ".*No such file")],
)
def test_a_damaged_state_is_told_of(tmp_path: Path, name: str, keep: int | None, told: str) -> None:
    folder = written(tmp_path / "state")
    if keep is None:
        (folder / name).unlink()
    else:
        os.truncate(folder / name, keep)
    with pytest.raises(ServiceError, match=f"the state in {folder} is damaged: {told}"):
        restore(learner(), folder)


def full_disk(folder: Path, rank: int) -> Path:
    folder.mkdir()
    (folder / f"__{rank}_0.distcp").symlink_to("/dev/full")
    return folder


def test_a_full_disk_fails_the_save_and_not_the_training(tmp_path: Path) -> None:
    one, folder = learner(), full_disk(tmp_path / "full", 0)
    saver = StateSaver(one)
    failure = saved_beside(saver, folder).exception()
    assert isinstance(failure, ServiceError)
    assert str(failure) == (f"cannot write the trainer's state to {folder}: rank 0: OSError(28, 'No space left on device')")
    assert not one.step(one.prepare([GROUP], 0))["skipped"]
    saved_beside(saver, tmp_path / "state").result()
    restore(learner(seed=1), tmp_path / "state")


def save_on_bad_disks(folder: str, states: str) -> list[str]:
    join_ranks(torch.device("cpu"))
    one = sharded_learner(Job(folder).recipe(), folder, torch.device("cpu"))
    if not one.world.is_first:
        worker_loop(one)
        leave_ranks()
        return []
    saver, told = StateSaver(one), []
    for rank in (1, 0):
        told.append(str(saved_beside(saver, full_disk(Path(states) / f"bad-{rank}", rank)).exception()))
        one.step(one.prepare([GROUP], 0))
    saver.stage()
    told.append(str(saved_beside(saver, Path(states) / "good").exception()))
    saver.stage()
    one.order(END)
    saver.end()
    leave_ranks()
    return told


def test_a_rank_that_cannot_write_fails_the_save_of_all_and_the_next_is_good(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model_of("qwen2-tied").save_pretrained(folder)
    told = on_ranks(2, save_on_bad_disks, str(folder), str(tmp_path))[0]
    for rank, message in zip((1, 0), told[:2], strict=True):
        assert message.endswith(f"bad-{rank}: rank {rank}: OSError(28, 'No space left on device')")
    assert told[2] == "None"
    restored = learner(seed=1)
    restore(restored, tmp_path / "good")
    assert restored.optimizer.steps_taken == 2
    for rank in (1, 0):
        with pytest.raises(FieldError, match="has no complete trainer state"):
            restore(restored, tmp_path / f"bad-{rank}")

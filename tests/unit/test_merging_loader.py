"""Factors merged into a checkpoint by the actor, against the weights that the trainer itself would have sent."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.fields import LoraConfig, ModelConfig, Recipe
from pipelinerl.transfer.chunks import Unpacker, chunk_of
from pipelinerl.transfer.manifest import Manifest, ManifestDiffers
from services.actor.weight_sync.loaders import MergingLoader
from services.trainer.distributed.world import ADAPTER, WEIGHTS
from services.trainer.learn.lora import layer_adapters
from services.trainer.learn.model import load_policy
from services.trainer.learn.step import Learner
from services.trainer.policy_trainer import weight_sender
from services.trainer.weight_sync.sender import adapter_factors
from tests.unit.builders import make_recipe
from tests.unit.test_lora import FAMILIES, model
from tests.unit.test_transfer_worker import KeepingLoader

CPU = torch.device("cpu")


def learner(folder: Path, family: str, dtype: str) -> tuple[Learner, Recipe]:
    """With adapters that are not 0, from a float32 checkpoint."""
    model(family).save_pretrained(folder)
    place = {"source": "path", "name": str(folder), "max_context": 64, "dtype": dtype}
    lora = {"rank": 3, "alpha": 5.0}
    recipe = make_recipe(model=place, trainer={"tokens_per_microbatch": 64, "batch_size": 4, "lora": lora})
    policy = load_policy(str(folder), ModelConfig(**place), lora=LoraConfig(**lora))  # type: ignore[arg-type]
    with torch.no_grad():
        for adapter in layer_adapters(policy.model).values():
            adapter.b.normal_(std=0.5)
    return Learner(policy, recipe.algorithm, recipe.trainer), recipe


def received(manifest: Manifest, stream: Tensor) -> Iterable[tuple[str, Tensor]]:
    """As from the wire; the memory of each chunk is used for something else afterwards."""
    unpacker = Unpacker(manifest, lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))
    for chunk in manifest.chunks:
        unpacker.room(chunk).copy_(chunk_of(stream, chunk))
        complete = unpacker.add(chunk)
        yield from complete
        for _, tensor in complete:
            tensor.zero_()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_actors_sum_is_the_trainers(family: str, dtype: str, tmp_path: Path) -> None:
    learning, recipe = learner(tmp_path, family, dtype)
    sender = weight_sender(learning, recipe, "gloo")
    snapshot = sender.snapshot(PolicyVersion(1, 1), learning.gather(ADAPTER))
    trained = sum(weight.numel() for weight in learning.policy.model.parameters() if weight.requires_grad)
    assert trained == sum(math.prod(spec.shape) for spec in sender.manifest.parameters)

    within, base = KeepingLoader(), load_file(tmp_path / "model.safetensors")
    loader = MergingLoader(within, base.items(), sender.manifest, CPU)
    loader.check(sender.manifest)
    loader.load(received(sender.manifest, snapshot.stream))
    loader.swap()
    assert loader.mode == within.mode
    assert within.live.keys() == base.keys()
    whole, adapted = dict(learning.gather(WEIGHTS)), {item.name for item in sender.manifest.low_rank}
    assert adapted == {f"{name}.weight" for name in layer_adapters(learning.policy.model)}
    for name, weight in within.live.items():
        assert torch.equal(weight, whole[name] if name in adapted else base[name]), name
        assert torch.equal(weight.float(), base[name]) == (name not in adapted), name


def test_what_is_dropped_is_not_swapped(tmp_path: Path) -> None:
    learning, recipe = learner(tmp_path, "llama-tied", "float32")
    sender = weight_sender(learning, recipe, "gloo")
    within = KeepingLoader()
    loader = MergingLoader(within, load_file(tmp_path / "model.safetensors").items(), sender.manifest, CPU)
    loader.load(learning.gather(ADAPTER))
    loader.drop()
    loader.swap()
    assert within.live == {}


def test_a_checkpoint_without_an_adapted_weight_is_refused(tmp_path: Path) -> None:
    learning, _ = learner(tmp_path, "llama-tied", "float32")
    manifest = adapter_factors(learning.policy.model, wire_dtype="", chunk_bytes=2**14)
    base = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    other = base | {name: base[name].T.contiguous()}
    with pytest.raises(ManifestDiffers, match=rf"{name}: shape"):
        MergingLoader(KeepingLoader(), other.items(), manifest, CPU).check(manifest)
    del other[name]
    with pytest.raises(ManifestDiffers, match=rf"{name}: presence .*trainer\.lora\.send: merged"):
        MergingLoader(KeepingLoader(), other.items(), manifest, CPU).check(manifest)

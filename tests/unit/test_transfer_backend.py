import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pipelinerl.errors import FieldError
from services.actor.metrics import ActorMetrics
from services.trainer.policy_trainer import transfer_backend


@pytest.mark.parametrize(
    ("wanted", "on_gpu", "backend"),
    [("auto", False, "gloo"), ("auto", True, "nccl"), ("gloo", True, "gloo"), ("nccl", True, "nccl")],
)
def test_backend_follows_from_the_recipe_and_the_trainers_device(wanted, on_gpu, backend) -> None:
    assert transfer_backend(wanted, on_gpu) == backend


def test_nccl_without_a_gpu_names_the_field_and_the_fix() -> None:
    with pytest.raises(FieldError) as caught:
        transfer_backend("nccl", on_gpu=False)
    assert caught.value.field == "weights.backend"
    assert "gloo" in caught.value.fix


def test_metric_says_which_way_of_loading_is_in_use_and_no_other() -> None:
    registry = CollectorRegistry()
    metrics = ActorMetrics(registry)
    metrics.show_weight_loader("shadow")
    metrics.show_weight_loader("in_place")

    text = generate_latest(registry).decode()
    assert 'pipelinerl_actor_weight_loader{mode="in_place"} 1.0' in text
    assert 'mode="shadow"' not in text

"""A learner's state as named tensors, the same whatever number of ranks it is spread over and whatever dtype it computes in.

    weight/<parameter>      float32: the master where there is one; of adapters alone where only these are trained
    exp_avg/<parameter>     float32, as are exp_avg_sq/… and step/… (a number): AdamW's moments; those in 8 bit, dequantised
    steps_taken             int64: of the schedule
    rng/<device>/<rank>     uint8: torch's random state, `cpu` and where there is one `cuda`

Parameters are named as `TokenScorer` names them, value head included. Sharded ones are DTensors of all ranks. Frozen weights
and the reference are not part: they are those of the model that the run began from. Not here: files (`ranks/saving.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from services.trainer.learn.step import Learner

WEIGHT, STEPS_TAKEN, RNG = "weight", "steps_taken", "rng"


def trained_parameters(learner: Learner) -> dict[str, nn.Parameter]:
    """What the optimizer steps, by the name of the model's parameter: float32, sharded where weights are."""
    names = {id(parameter): name for name, parameter in learner.policy.scorer.named_parameters()}
    return {names[id(live)]: stepped for live, stepped in learner.optimizer.trained()}


def learner_state(learner: Learner) -> dict[str, Tensor]:
    """The state by name: the learner's own tensors, which change with the next step; moments in 8 bit as it keeps them.

    Whoever fills all of them with another state of the same names and shapes, puts float32 tensors in the place of those in
    8 bit, and calls `adopt`, has restored it.
    """
    learner.optimizer.begin_moments()
    state: dict[str, Tensor] = {}
    for name, stepped in trained_parameters(learner).items():
        state[f"{WEIGHT}/{name}"] = stepped.detach()
        for moment, value in learner.optimizer.moments(stepped).items():
            state[f"{moment}/{name}"] = value
    state[STEPS_TAKEN] = torch.tensor(learner.optimizer.steps_taken)
    return state | _random_states(learner)


@torch.no_grad()
def adopt(learner: Learner, state: Mapping[str, Tensor]) -> None:
    """Takes over from `state`, which is `learner_state`'s with other values, what is not in the learner's own tensors."""
    for name, stepped in trained_parameters(learner).items():
        for moment, value in learner.optimizer.moments(stepped).items():
            if is_quantized(value):
                local_part(value).copy_(local_part(state[f"{moment}/{name}"]))
    learner.optimizer.publish_masters()
    learner.optimizer.steps_taken = int(state[STEPS_TAKEN])
    _adopt_random_states(learner, state)


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard, or the tensor itself. Shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_quantized(tensor: Tensor) -> bool:
    """Whether it is of a class of torchao's, which is not imported here."""
    return type(local_part(tensor)) is not Tensor


def plain_part(tensor: Tensor) -> Tensor:
    """`local_part`; of one in 8 bit, a float32 copy."""
    local = local_part(tensor)
    return local.dequantize() if is_quantized(tensor) else local


def _random_states(learner: Learner) -> dict[str, Tensor]:
    states = {_random(learner, "cpu"): torch.get_rng_state()}
    device = learner.policy.device
    return states | {_random(learner, "cuda"): torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def _adopt_random_states(learner: Learner, state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state[_random(learner, "cpu")])
    if learner.policy.device.type == "cuda":
        torch.cuda.set_rng_state(state[_random(learner, "cuda")], learner.policy.device)


def _random(learner: Learner, device_type: str) -> str:
    return f"{RNG}/{device_type}/{learner.world.layout.rank}"

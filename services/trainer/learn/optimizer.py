"""AdamW on float32 parameters, with clipping, a learning-rate schedule, and steps that are skipped rather than poisoned.

A model in 16 bit gets float32 master copies: gradients of all micro-batches are summed into them in float32, the
optimizer steps them, and the 16-bit weights, which are what actors serve, are their rounding. Not here: which combinations
of settings are refused (`pipelinerl.recipe`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from pipelinerl.errors import FieldError, first_line
from pipelinerl.recipe.fields import TrainerConfig
from services.trainer.learn.lora import whole


def learning_rate(step: int, config: TrainerConfig) -> float:
    """Learning rate of the step that turns policy version `step` into `step + 1`.

    Linear warm-up over `warmup_steps` (its first step already learns) to the peak, then by `schedule`:
    constant; linear or cosine down to `final_learning_rate` of the peak at `steps`; `wsd` (warm-up, stable, decay:
    MiniCPM, arXiv 2404.06395), constant and then linear down to it over the last `decay_steps`; or `inverse_sqrt`,
    peak · √(warmup_steps / step) (arXiv 1706.03762, section 5.3), never below it.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    peak, final = config.learning_rate, config.final_learning_rate
    match config.schedule:
        case "linear":
            return peak * (1 - (1 - final) * _progress(step, config.warmup_steps, config.steps))
        case "cosine":
            angle = math.pi * _progress(step, config.warmup_steps, config.steps)
            return peak * (final + (1 - final) * 0.5 * (1 + math.cos(angle)))
        case "wsd":
            return peak * (1 - (1 - final) * _progress(step, config.steps - config.decay_steps, config.steps))
        case "inverse_sqrt":
            return peak * max(final, math.sqrt(max(1, config.warmup_steps) / max(1, step)))
        case _:
            return peak


def _progress(step: int, first: int, last: int) -> float:
    """From 0 up to `first` to 1 from `last` on."""
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""Of each parameter: both moments in its shape, and how many steps it has had, a float32 number."""


def build_adamw(groups: list[dict[str, Any]], config: TrainerConfig) -> Optimizer:
    """Over parameter groups of float32 parameters; each may have a `weight_decay` and a `RATE_FACTOR` of its own.

    `adamw` keeps both moments in float32, fused where the device can. `adamw_8bit` is torchao's, block-wise quantised (Dettmers
    et al., arXiv 2110.02861): moments take 2.03 bytes a parameter instead of 8. Tensors of less than `MIN_QUANTIZED` elements,
    or not of whole blocks of 256, keep float32 moments; with sharded parameters that is the shard of each rank. Raises
    `FieldError` where it does not import, or its step does not compile.
    """
    common: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "eps": config.epsilon}
    devices = {parameter.device for group in groups for parameter in group["params"]}
    if config.optimizer == "adamw":
        return AdamW(groups, fused=all(device.type in ("cpu", "cuda") for device in devices), **common)
    try:
        from torchao.optim import AdamW8bit  # takes seconds
    except ImportError as error:
        fix = f"needs torchao, which does not import here ({error}): run make adamw8bit, or use adamw"
        raise FieldError("trainer.optimizer", config.optimizer, fix) from error
    optimizer: Optimizer = AdamW8bit(groups, **common)
    if all(device.type == "cpu" for device in devices):
        # As it is written the step needs no C++ compiler, and is several times slower than compiled.
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)  # type: ignore[method-assign]
    else:
        for device in devices:
            check_compiled_step(AdamW8bit, device)
    return optimizer


MIN_QUANTIZED = 4096
"""Elements of the smallest tensor whose moments are in 8 bit."""


def check_compiled_step(adamw_8bit: Any, device: torch.device) -> None:
    """Compiles and takes a step of one small tensor (seconds). Raises `FieldError` when this machine cannot."""
    probe = nn.Parameter(torch.zeros(MIN_QUANTIZED, device=device))
    probe.grad = torch.zeros_like(probe)
    try:
        adamw_8bit([probe]).step()
    except RuntimeError as error:
        fix = (
            f"its step is compiled by torch, which fails on {device.type} here: {first_line(error)}; "
            "install a C and C++ compiler (gcc, g++; CC and CXX name others), or use adamw"
        )
        raise FieldError("trainer.optimizer", "adamw_8bit", fix) from error


RATE_FACTOR = "rate_factor"
"""Key of a parameter group: its learning rate relative to that of the policy; 1 where it is missing."""
VALUE_RATE_FACTOR = 10.0
"""Without `trainer.value_learning_rate`: the head is one linear layer that begins at 0, and must follow the policy."""


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """`rate` is the policy's. One that is kept in a tensor stays in it: a compiled step reads it there."""
    for group in optimizer.param_groups:
        of_group = rate * group.get(RATE_FACTOR, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(of_group)
        else:
            group["lr"] = of_group


class PolicyOptimizer:
    """AdamW over the trainable parameters of a model, and a value head beside it with a learning rate of its own.

    `backward()` fills gradients, `step` uses and clears them. Only the policy's are cut to a norm: the head's are as large as
    its errors, and would take a common bound from the policy. Raises `FieldError` when the recipe's optimizer does not work
    here.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], config: TrainerConfig, value_head: nn.Module | None = None) -> None:
        self.config = config
        self.steps_taken = 0
        """Optimizer steps taken; skipped ones do not count and do not move the schedule."""
        policy = [parameter for parameter in parameters if parameter.requires_grad]
        head = [] if value_head is None else list(value_head.parameters())
        self._live = [*policy, *head]
        self._stepped = [_master_of(parameter) for parameter in self._live]
        self._policy, self._head = self._stepped[: len(policy)], self._stepped[len(policy) :]
        factor = VALUE_RATE_FACTOR
        if config.value_learning_rate is not None:
            factor = config.value_learning_rate / config.learning_rate
        groups = [
            {"params": [one for one in self._policy if one.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [one for one in self._policy if one.ndim < 2], "weight_decay": 0.0},  # norms and biases
            {"params": self._head, "weight_decay": 0.0, RATE_FACTOR: factor},  # decay would bias it towards 0
        ]
        self._adamw = build_adamw([group for group in groups if group["params"]], config)

    def step(self, loss: float, total_weight: float) -> dict[str, Any]:
        """Clips, steps and clears the gradients. A non-finite `loss` or gradient changes nothing but is told.

        `total_weight`: the sum of the weights of all tokens in the loss (`sequence_weights`), which is the default bound of the
        norm: the gradient is cut where the weighted mean of its tokens is longer than 1.

        Returns, as metrics.jsonl has them: `learning_rate`; `grad_norm`, the policy's global L2 norm before clipping;
        `clipped`: whether it was cut; `skipped`: why no weight changed, "" when the step was taken.
        """
        rate = learning_rate(self.steps_taken, self.config)
        bound = total_weight if self.config.max_grad_norm is None else self.config.max_grad_norm
        norm = float(whole(nn.utils.clip_grad_norm_(self._policy, bound)))
        norms = [norm]
        if of_head := [parameter.grad for parameter in self._head if parameter.grad is not None]:
            norms.append(float(whole(nn.utils.get_total_norm(of_head))))
        skipped = "" if all(map(math.isfinite, norms)) else "gradient not finite"
        if not math.isfinite(loss):
            skipped = "loss not finite"
        if not skipped:
            set_learning_rate(self._adamw, rate)
            self._adamw.step()
            self.publish_masters()
            self.steps_taken += 1
        self._adamw.zero_grad(set_to_none=True)
        return {"learning_rate": rate, "grad_norm": norm, "clipped": not skipped and norm > bound, "skipped": skipped}

    @torch.no_grad()
    def publish_masters(self) -> None:
        """The 16-bit weights become the rounding of their masters."""
        for live, stepped in self.trained():
            if live is not stepped:
                live.copy_(stepped)

    def trained(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """(parameter of the model, float32 parameter that is stepped in its place or the same) of each that is trained."""
        return zip(self._live, self._stepped, strict=True)

    def moments(self, stepped: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's own tensors of a parameter, by `MOMENTS`, once `begin_moments` or a step has made them."""
        state = self._adamw.state[stepped]
        return {name: state[name] for name in MOMENTS}

    def begin_moments(self) -> None:
        """Gives parameters that were never stepped the moments of 0 that their first step begins with. Forgets gradients.

        AdamW makes them as it likes them, in a step without gradient at a learning rate of 0, which changes no weight.
        """
        adamw = self._adamw
        new = [parameter for parameter in self._stepped if not adamw.state.get(parameter)]
        adamw.zero_grad(set_to_none=True)
        for parameter in new:
            parameter.grad = torch.zeros_like(parameter)
        set_learning_rate(adamw, 0.0)
        if new:
            adamw.step()
        adamw.zero_grad(set_to_none=True)
        for parameter in new:
            adamw.state[parameter]["step"].zero_()


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself in float32; else a float32 copy that takes over its gradients as they are made."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def take_gradient(source: Tensor) -> None:
        assert source.grad is not None
        gradient, source.grad = source.grad, None
        # The sum reads 16 bit and writes 32: a float32 copy of the gradient would be twice the traffic.
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(take_gradient)
    return master

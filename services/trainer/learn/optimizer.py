"""AdamW on float32 parameters, with clipping and a learning-rate schedule. A 16-bit model gets float32 master copies, which
also sum the gradients of all micro-batches. Actors serve the masters rounded to 16 bits."""

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
    """Return the learning rate of the optimizer step that follows `step` earlier ones, not counting skipped steps.

    It rises linearly to the peak over `warmup_steps`, then follows `schedule`. The final rate is `final_learning_rate` · peak.
    `linear` and `cosine` fall to it at `steps`, `wsd` (MiniCPM, arXiv 2404.06395) linearly over the last `decay_steps`.
    `inverse_sqrt` (arXiv 1706.03762, 5.3) is peak · √(max(1, warmup_steps) / step), but at least the final rate.
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
    return min(1.0, max(0.0, (step - first) / max(1, last - first)))


MOMENTS = ("exp_avg", "exp_avg_sq", "step")
"""AdamW's state of a parameter: two moments in the parameter's shape, and its number of steps as a float32."""


def build_adamw(groups: list[dict[str, Any]], config: TrainerConfig) -> Optimizer:
    """Return AdamW over groups of float32 parameters, each with an optional `weight_decay` and `RATE_FACTOR`.

    `adamw_8bit` is torchao's, with block-wise quantised moments (Dettmers et al., arXiv 2110.02861): 2.03 bytes per parameter
    instead of 8. Raises `FieldError` if torchao cannot be imported, or its step does not compile.
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
        # Uncompiled, the step needs no C++ compiler, but is several times slower.
        optimizer.step = torch.compiler.set_stance("force_eager")(optimizer.step)  # type: ignore[method-assign]
    else:
        for device in devices:
            check_compiled_step(AdamW8bit, device)
    return optimizer


MIN_QUANTIZED = 4096
"""torchao keeps float32 moments for a tensor or shard with fewer elements, or with a number that 256 does not divide."""


def check_compiled_step(adamw_8bit: Any, device: torch.device) -> None:
    """Take a compiled step on a small tensor, which takes seconds. Raises `FieldError` if this machine cannot compile it."""
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
"""Key in an optimizer's parameter group: its learning rate as a multiple of the policy's. A missing key means 1."""
VALUE_RATE_FACTOR = 10.0
"""Default `RATE_FACTOR` of the value head, which starts at 0 and must learn faster than the policy."""


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Set the learning rate of each group, from the policy's `rate`. A compiled step reads the rate from a tensor."""
    for group in optimizer.param_groups:
        of_group = rate * group.get(RATE_FACTOR, 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(of_group)
        else:
            group["lr"] = of_group


class PolicyOptimizer:
    """AdamW over the trainable parameters of a model, and over a value head with a separate learning rate. Only the policy's
    gradient is clipped, not the head's. Raises `FieldError` like `build_adamw`."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: TrainerConfig, value_head: nn.Module | None = None) -> None:
        self.config = config
        self.steps_taken = 0
        """Number of steps that changed weights. Only these advance the learning-rate schedule."""
        policy = [parameter for parameter in parameters if parameter.requires_grad]
        head = [] if value_head is None else list(value_head.parameters())
        self._live = [*policy, *head]
        self._stepped = [_master_of(parameter) for parameter in self._live]
        self._policy, self._head = self._stepped[: len(policy)], self._stepped[len(policy) :]
        groups = [
            {"params": [one for one in self._policy if one.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [one for one in self._policy if one.ndim < 2], "weight_decay": 0.0},  # norms and biases
            {"params": self._head, "weight_decay": 0.0, RATE_FACTOR: _value_factor(config)},  # decay would bias it towards 0
        ]
        self._adamw = build_adamw([group for group in groups if group["params"]], config)

    def use(self, config: TrainerConfig) -> None:
        """Use the learning rates, the schedule and the gradient norm's bound of `config` in later steps."""
        self.config = config
        for group in self._adamw.param_groups:
            if RATE_FACTOR in group:
                group[RATE_FACTOR] = _value_factor(config)

    def step(self, loss: float, total_weight: float) -> dict[str, Any]:
        """Clip the policy's gradient, take a step, clear gradients. No weight changes if the loss or a gradient is not finite.

        `total_weight`: sum of all tokens' weights in the loss. As the default bound of the gradient's norm, it clips the
        gradient of the weighted mean at norm 1. Return figures of metrics.jsonl: `learning_rate`, `grad_norm` before clipping,
        `clipped`, and `skipped`, the reason why no weight changed.
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
        for live, stepped in self.trained():
            if live is not stepped:
                live.copy_(stepped)

    def trained(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        """Yield (parameter of the model, float32 parameter that the optimizer updates), which may be the same."""
        return zip(self._live, self._stepped, strict=True)

    def moments(self, stepped: nn.Parameter) -> dict[str, Tensor]:
        """Return AdamW's tensors of a parameter, by name (`MOMENTS`). They exist after `begin_moments` or a step."""
        state = self._adamw.state[stepped]
        return {name: state[name] for name in MOMENTS}

    def begin_moments(self) -> None:
        """Create missing moments as zeros in AdamW's own format, by a step at learning rate 0. Clear all gradients."""
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


def _value_factor(config: TrainerConfig) -> float:
    return VALUE_RATE_FACTOR if config.value_learning_rate is None else config.value_learning_rate / config.learning_rate


def _master_of(parameter: nn.Parameter) -> nn.Parameter:
    """Return `parameter` if it is in float32, else a float32 copy to which each new gradient is moved."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def take_gradient(source: Tensor) -> None:
        assert source.grad is not None
        gradient, source.grad = source.grad, None
        # The 16-bit gradient is added directly, because a float32 copy of it would double the memory traffic.
        master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

    parameter.register_post_accumulate_grad_hook(take_gradient)
    return master

"""Estimate the memory that a run needs on accelerators, and list their data sheets.

An actor holds weights, KV cache and weight updates; a trainer rank holds weights, gradients and optimizer state. Estimates need
a model's size and, if possible, the size of its KV cache per token. In a mixture of experts, all experts count as memory,
but only those that a token uses count as compute. Activations get `ENGINE_GIB` on an actor's accelerator, and the share
1 - `MODEL_STATE_SHARE` on a trainer rank's. Replicated tensors and other processes on the device are not counted.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from pipelinerl.errors import FieldError, counted
from pipelinerl.recipe.fields import VLLM_SHARE, Recipe

GIB = 2**30
ENGINE_GIB = 3.0
"""Memory of an accelerator that vLLM needs in addition to weights and KV cache."""
UPDATE_GIB = 2.0
"""Memory of a weight update beyond the new weights: chunks, the largest whole tensor, NCCL's buffers."""
QUANTISED_BYTES = 1
"""Bytes of a parameter in a quantised engine. 4-bit methods also count as 1, because they leave some weights unquantised."""
MOST_SNAPSHOTS = 3
"""Number of weight snapshots in a trainer: of the served version, of the version in transfer, and of the next version."""
LOG_COPIES = 2
"""Number of snapshots that the weight log adds: of the version that it wrote last, and of the one that it is writing."""
MODEL_STATE_SHARE = 0.7
"""Share of a trainer rank's memory for weights, gradients and optimizer state; the rest is for activations."""
LEAST_ACTIVATIONS_GIB = 4.0
"""Minimum memory for a rank's activations on a shared GPU."""
CONTEXTS_GIB = 1.0
"""Memory of the CUDA contexts of two processes."""
CACHED_GIB = 1.0
"""Memory that torch caches in the trainer while it does not compute."""
ADAPTERS = 0.9
"""Factor for estimates. Adapters on all linear layers have ADAPTERS × rank × (active parameters of the model)^(2/3) parameters.
The true factor is 0.65 to 0.9 for Qwen2.5 of 0.5B to 7B and Llama of 8B and 70B."""
MOST_PER_ACTOR = 64
"""Maximum number of accelerators of an actor, and so of `actor.engine.tensor_parallel_size`."""


@dataclass(frozen=True)
class Model:
    parameters: float
    kv_bytes: float
    """Bytes of one token in the KV cache, over all layers."""
    dtype_bytes: int = 2
    active_share: float = 1.0
    """Share of the parameters that one token uses. It is below 1 only in a mixture of experts."""
    adapters: int | None = None
    """Number of the adapters' parameters; None = estimated."""
    kv_source: str = ""
    """Words that tell the user whether `kv_bytes` is exact or an assumption."""

    @classmethod
    def of(cls, recipe: Recipe, parameters: float, kv_numbers: int = 0, **known: Any) -> Model:
        """Return the recipe's model; `known`: its other fields. `kv_numbers`: numbers per token in the KV cache; 0 = unknown.
        If unknown, `kv_bytes` is estimated: 128 KiB per token, as in Llama 3 8B, times the square root of `parameters` / 8e9.
        Most models need less."""
        dtype_bytes = 4 if recipe.model.dtype == "float32" else 2
        kv_bytes = kv_numbers * dtype_bytes or 128 * 1024 * math.sqrt(parameters / 8e9)
        source = "from its config.json" if kv_numbers else "assumed, since its config.json is not on this machine"
        return cls(parameters, kv_bytes, dtype_bytes, kv_source=source, **known)

    @property
    def kv_outline(self) -> str:
        return f"{self.kv_bytes / 1024:.0f} KiB of KV cache per token ({self.kv_source})"

    @property
    def weights_bytes(self) -> float:
        return self.parameters * self.dtype_bytes

    @property
    def active(self) -> float:
        return self.parameters * self.active_share

    @property
    def layer_bytes(self) -> float:
        """Estimated bytes of a decoder layer. The number of layers, 28 at 7.6B, grows with the cube root of model size."""
        layers = 28 * math.cbrt(self.parameters / 7.6e9) / (2 if self.active_share < 1 else 1)
        return self.weights_bytes / max(1.0, layers)


def engine_bytes(recipe: Recipe, model: Model) -> float:
    """Return the bytes of the weights that an actor serves, over all its accelerators."""
    return model.parameters * QUANTISED_BYTES if recipe.actor.engine.quantization else model.weights_bytes


def kv_cache_gib(recipe: Recipe, model: Model, memory_gib: float) -> float:
    """Return the memory of an actor's KV cache, in GiB, summed over its accelerators of `memory_gib` each."""
    engine = recipe.actor.engine
    in_share = memory_gib * vllm_share(recipe, model, memory_gib) - ENGINE_GIB
    return engine.tensor_parallel_size * in_share - engine_bytes(recipe, model) / GIB


def update_gib(recipe: Recipe, model: Model, ranks: int | None = None) -> float:
    """Return the GiB per GPU that an update needs outside vLLM's share. `ranks`: GPUs per actor; None = the recipe's."""
    if loads_paused(recipe):
        return update_bytes(layer=model.layer_bytes * wire_bytes(recipe, model) / model.dtype_bytes) / GIB
    return update_bytes(version_bytes(recipe, model) / (ranks or recipe.actor.engine.tensor_parallel_size)) / GIB


def update_bytes(kept: float = 0, layer: float = 0) -> float:
    """Return the bytes that a weight update needs on an accelerator in addition to the live weights. `kept`: bytes of new
    weights stored there until the swap. `layer`: bytes of the largest decoder layer, if the paused actor loads by layers."""
    return kept + 2 * layer + UPDATE_GIB * GIB  # vLLM has the received tensors and the layer that it fills.


def loads_paused(recipe: Recipe) -> bool:
    """Return whether an actor stops generating while it loads an update: quantised engines do, unless adapters are sent."""
    return bool(recipe.actor.engine.quantization) and not sends_adapters(recipe)


def sends_adapters(recipe: Recipe) -> bool:
    """Return whether actors receive adapter factors instead of weights."""
    return recipe.trainer.lora is not None and recipe.trainer.lora.send == "adapter"


def adapter_parameters(recipe: Recipe, model: Model) -> float:
    """Return the number of the adapters' parameters, which may be an estimate; 0 without adapters."""
    if recipe.trainer.lora is None:
        return 0.0
    return recipe.trainer.lora.rank * ADAPTERS * model.active ** (2 / 3) if model.adapters is None else model.adapters


def sent_bytes(recipe: Recipe, model: Model) -> float:
    """Return the bytes of a version as it is sent, in `weights.wire_dtype`."""
    return version_bytes(recipe, model) * wire_bytes(recipe, model) / model.dtype_bytes


def version_bytes(recipe: Recipe, model: Model) -> float:
    """Return the bytes of a version in the model's dtype: of the adapters if only these are sent, else of all weights."""
    return adapter_parameters(recipe, model) * model.dtype_bytes if sends_adapters(recipe) else model.weights_bytes


def wire_bytes(recipe: Recipe, model: Model) -> int:
    """Return the number of bytes in which one parameter is sent."""
    return {"float32": 4, "bfloat16": 2}.get(recipe.weights.wire_dtype, model.dtype_bytes)


def engine_gib(recipe: Recipe, model: Model, ranks: int | None = None) -> float:
    """Return the GiB that vLLM needs on each accelerator: for weights, overhead, and the KV cache of one sequence of
    `model.max_context`. `ranks`: GPUs per actor; None = the recipe's."""
    shared = (engine_bytes(recipe, model) + model.kv_bytes * recipe.model.max_context) / GIB
    return shared / (ranks or recipe.actor.engine.tensor_parallel_size) + ENGINE_GIB


def engine_shares(recipe: Recipe, model: Model, total_gib: float, left_gib: float) -> tuple[float, float]:
    """Return the share of an accelerator of `total_gib` that vLLM needs, and the share that it may take. `left_gib` is the
    memory for vLLM and a weight update together."""
    least, most = engine_gib(recipe, model) / total_gib, (left_gib - update_gib(recipe, model)) / total_gib
    return math.ceil(100 * least) / 100, math.floor(100 * most) / 100


def vllm_share(recipe: Recipe, model: Model, memory_gib: float) -> float:
    """Return vLLM's share of an accelerator that no trainer uses. `auto`: 0.9, or less if a weight update needs the room."""
    most = engine_shares(recipe, model, memory_gib, memory_gib)[1]
    return recipe.actor.engine.gpu_memory_utilization or max(0.01, min(VLLM_SHARE, most))


def actor_problem(recipe: Recipe, model: Model, memory_gib: float) -> FieldError | None:
    """Return why an actor cannot work on accelerators of `memory_gib`, or None. An actor needs room for the weights, an update,
    and the KV cache of one sequence of `model.max_context`."""
    size = recipe.actor.engine.tensor_parallel_size
    weights, longest = engine_bytes(recipe, model) / GIB, model.kv_bytes * recipe.model.max_context / GIB

    def fits(size: int) -> bool:
        return engine_gib(recipe, model, size) + update_gib(recipe, model, size) <= memory_gib

    if not fits(size):
        enough = next((2**n for n in range(MOST_PER_ACTOR.bit_length()) if fits(2**n)), None)
        twice = "" if loads_paused(recipe) or sends_adapters(recipe) else ", which an update holds twice"
        overhead = ENGINE_GIB + (update_gib(recipe, model) if loads_paused(recipe) else UPDATE_GIB)
        large = f"{weights:,.0f} GiB of weights{twice}, {longest:.1f} GiB of KV cache for one sequence of model.max_context, "
        large += f"and {overhead:.3g} GiB of overhead on each accelerator do not fit accelerators of {memory_gib:,.0f} GiB"
        fix = f"use {enough}" if enough else f"even {MOST_PER_ACTOR}, the maximum, are too few"
        return FieldError("actor.engine.tensor_parallel_size", size, f"{large}; {fix}")
    update, sent = update_gib(recipe, model), "adapters" if sends_adapters(recipe) else "weights"
    held = "twice the largest layer" if loads_paused(recipe) else f"a second instance of the {sent}"
    needs = f"a weight update needs {update:.1f} GiB: {held} ({update - UPDATE_GIB:.1f}), and {UPDATE_GIB:g} for receiving"
    return share_problem(recipe, *engine_shares(recipe, model, memory_gib, memory_gib), f", because {needs}")


def share_problem(recipe: Recipe, least: float, most: float, why: str = "") -> FieldError | None:
    """Return an error if vLLM's share is not between `least` and `most` (see `engine_shares`). `why`: reason for `most`."""
    given = recipe.actor.engine.gpu_memory_utilization
    if least <= (min(VLLM_SHARE, most) if given is None else given) <= most:
        return None
    fix = f"vLLM needs at least {least} for weights, overhead and the KV cache of a sequence of model.max_context tokens"
    fix += f", and may have at most {most}{why}; use a value between these{', or auto' if least <= VLLM_SHARE else ''}"
    return FieldError("actor.engine.gpu_memory_utilization", given or "auto", fix)


def state_bytes(recipe: Recipe, model: Model) -> float:
    """Return the bytes of training state over all ranks that share a copy: float32 weights and gradients, the optimizer's two
    moments, 16-bit weights if the model has them, and a KL term's reference model. With adapters, only these have gradients and
    moments, and the frozen weights are also the reference model."""
    moments = 2 if recipe.trainer.optimizer == "adamw_8bit" else 8
    each = (model.dtype_bytes if model.dtype_bytes < 4 else 0) + 4 + 4 + moments
    if recipe.trainer.lora is not None:
        return model.weights_bytes + adapter_parameters(recipe, model) * each
    return model.parameters * each + model.weights_bytes * (recipe.algorithm.kl_coefficient > 0)


def shared_gib(recipe: Recipe, model: Model) -> tuple[float, float]:
    """Return the GiB that a rank on an actor's GPU needs while it computes, and that the rank keeps while the actor generates.
    The two are equal without `actor.colocate`. Assumes snapshots in host memory, and `trainer.gradient_checkpointing`."""
    held = state_bytes(recipe, model) / GIB / (recipe.trainer.shard_ranks or recipe.trainer.ranks)
    computing = max(held / MODEL_STATE_SHARE, held + LEAST_ACTIVATIONS_GIB) + CONTEXTS_GIB
    return computing, held + CACHED_GIB + CONTEXTS_GIB if recipe.actor.colocate else computing


def snapshot_gib(recipe: Recipe, model: Model, memory_gib: float = math.inf) -> tuple[float, float]:
    """Return the GiB of the trainer's snapshots on its device, which has `memory_gib` and no actor, and in host memory. They
    are in host memory with several ranks, with Gloo, or if activations need the device's memory. Those of adapters are not
    counted, because they are small."""
    if sends_adapters(recipe):
        return 0.0, 0.0
    copies = MOST_SNAPSHOTS + LOG_COPIES * bool(recipe.weights.log_place)
    gib = copies * model.parameters * wire_bytes(recipe, model) / GIB
    fits = state_bytes(recipe, model) / GIB + gib <= memory_gib * MODEL_STATE_SHARE
    return (0.0, gib) if recipe.weights.backend == "gloo" or recipe.trainer.ranks > 1 or not fits else (gib, 0.0)


def checkpoint_bytes(recipe: Recipe, parameters: int) -> int:
    """Return a checkpoint's bytes on disk: the model, float32 weights and two moments. With adapters, only the model counts."""
    weights = int(Model.of(recipe, parameters).weights_bytes)
    return weights if recipe.trainer.lora is not None else weights + parameters * (4 + 8)


def fewest_ranks(recipe: Recipe, model: Model, memory_gib: float) -> int:
    """Return how many ranks must share a copy of weights, gradients and optimizer state to leave room for activations."""
    return math.ceil(state_bytes(recipe, model) / (memory_gib * MODEL_STATE_SHARE * GIB))


def ranks_of_a_copy(recipe: Recipe, model: Model, memory_gib: float) -> int:
    """Return how many ranks share a copy of weights and optimizer state; `fewest_ranks` if the recipe gives no number."""
    return recipe.trainer.shard_ranks or recipe.trainer.nproc or fewest_ranks(recipe, model, memory_gib)


def trainer_problem(recipe: Recipe, model: Model, memory_gib: float, ranks: int) -> FieldError | None:
    """Return why accelerators of `memory_gib` are too small if `ranks` share weights and optimizer state, or None."""
    fewest, state_gib = fewest_ranks(recipe, model, memory_gib), state_bytes(recipe, model) / GIB / ranks
    if ranks >= fewest:
        return None
    field, enough = "nproc", f"at least {fewest}"
    if recipe.trainer.shard_ranks:  # It must divide the number of ranks.
        field, nproc = "shard_ranks", recipe.trainer.ranks
        enough = str(next((number for number in range(fewest, nproc + 1) if nproc % number == 0), fewest))
    state = f"weights, gradients and optimizer state, shared by {counted(ranks, 'rank')}, take {state_gib:.1f} GiB per rank"
    fix = f"which leaves less than {1 - MODEL_STATE_SHARE:.0%} of {memory_gib:,.0f} GiB for activations; use {enough} ranks"
    return FieldError(f"trainer.{field}", getattr(recipe.trainer, field) or "auto", f"{state}, {fix}")


def memory_outline(recipe: Recipe, model: Model, memory_gib: float) -> list[tuple[str, str]]:
    """Return (name, value) rows about the memory of an actor's GPU and of a trainer's GPU."""
    engine, trainer = recipe.actor.engine, recipe.trainer
    size, in_share = engine.tensor_parallel_size, memory_gib * vllm_share(recipe, model, memory_gib)
    kv_gib, in_progress = kv_cache_gib(recipe, model, memory_gib), recipe.actor.sequences_in_progress
    each = kv_gib * GIB / model.kv_bytes / in_progress
    ranks = ranks_of_a_copy(recipe, model, memory_gib)
    state_gib, (snapshots, copies) = state_bytes(recipe, model) / GIB / ranks, snapshot_gib(recipe, model, memory_gib)
    kept = f" and the trainer keeps {shared_gib(recipe, model)[1]:.1f}" if recipe.actor.colocate else ""
    received_gib = model.parameters * wire_bytes(recipe, model) / GIB
    on_host = f"; if that does not fit, each actor needs {received_gib:.1f} GiB of host memory" if loads_paused(recipe) else ""
    on_device = f"; {snapshots:.1f} GiB for snapshots" if snapshots else ""
    beside = f", and {copies:.1f} GiB of host memory for copies of the weights" if copies else ""
    if recipe.actor.colocate:
        snapshots, on_device = ENGINE_GIB + CONTEXTS_GIB, f"; {ENGINE_GIB + CONTEXTS_GIB:g} GiB for the sleeping engine"
    return [
        ("parameters", f"{model.parameters / 1e9:.3g}B, {model.kv_outline}"),
        (
            "actor GPU",
            f"{in_share:.1f} GiB for vLLM: weights {engine_bytes(recipe, model) / GIB / size:.1f}, KV cache "
            f"{kv_gib / size:.1f} ({each:,.0f} tokens for each of {in_progress} sequences), other memory {ENGINE_GIB:g}; "
            f"{memory_gib - in_share:.1f} outside vLLM, of which updates need {update_gib(recipe, model):.1f}{kept}{on_host}",
        ),
        (
            "trainer GPU",
            f"weights, gradients and optimizer {state_gib:.1f} GiB on each of {counted(ranks, 'rank')}{on_device}; "
            f"{memory_gib - state_gib - snapshots:.1f} GiB for activations and gathered weights (trainer.nproc = "
            f"{trainer.nproc or 'auto'}: set it to the number of ranks on all nodes){beside}",
        ),
    ]


class Accelerator(NamedTuple):
    """The data sheet of an accelerator. A plan needs `name`, `memory` and `bandwidth`, which some entries lack."""

    devices: str
    """Regular expression for torch's whole name of the device, without the vendor."""
    flops: float
    """Dense FLOP/s in bfloat16."""
    name: str = ""
    memory: float = 0.0
    """Bytes of memory."""
    bandwidth: float = 0.0
    """Memory bandwidth in bytes per second."""


_DEVICES = (
    # Dense bfloat16 matrix products with float32 accumulation, from the vendors' data sheets (half of their figures "with
    # sparsity"), by torch's name of the device. Variants such as a laptop's GPU or a MIG slice are slower, so only exact
    # names have a peak. Blackwell: HGX B200/B300 and GB200/GB300 NVL72 data sheets (whole systems, divided by their GPUs).
    Accelerator(r"(B200|B300 SXM6 AC|B300)", 2250e12, name="B200", memory=180e9, bandwidth=7.7e12),
    Accelerator(r"(GB200|GB300)", 2500e12),
    # Hopper: H100 and H200 data sheets, GH200 data sheet. H800 has the arithmetic of the H100.
    Accelerator(r"(H100|H800)( 80GB HBM3| 64GB HBM2)?", 989.4e12, name="H100", memory=80e9, bandwidth=3.35e12),
    Accelerator(r"(H100|H800)( 80GB)? PCIe", 756.5e12),
    Accelerator(r"(H100|H200) NVL", 835.5e12),
    Accelerator(r"H200", 989.4e12, name="H200", memory=141e9, bandwidth=4.8e12),
    Accelerator(r"GH200 (480GB|120GB|144G HBM3e)", 989.4e12),
    Accelerator(r"H20", 148e12),
    # Ada: L4, L40 and L40S data sheets; RTX 4090: Ada GPU architecture white paper.
    Accelerator(r"L4", 121e12),
    Accelerator(r"L40", 181.05e12),
    Accelerator(r"L40S", 362.05e12, name="L40S", memory=48e9, bandwidth=0.864e12),
    Accelerator(r"RTX 6000 Ada Generation", 364.2e12),
    Accelerator(r"GeForce RTX 4090", 165.2e12),
    # Ampere: A100, A30, A40, A10 data sheets; RTX 3090 and A6000: GA102 white paper. A800 has the arithmetic of the A100.
    Accelerator(r"(A100|A800)[- ](SXM4|PCIE|PCIe)-40GB", 312e12, name="A100-40GB", memory=40e9, bandwidth=1.555e12),
    Accelerator(r"(A100|A800)([- ](SXM4|PCIE|PCIe)-80GB| 80GB PCIe)", 312e12, name="A100", memory=80e9, bandwidth=2.039e12),
    Accelerator(r"A30", 165e12),
    Accelerator(r"A40", 149.7e12),
    Accelerator(r"A10", 125e12),
    Accelerator(r"RTX A6000", 154.8e12),
    Accelerator(r"GeForce RTX 3090", 71e12),
    # GeForce of Blackwell: RTX Blackwell white paper.
    Accelerator(r"GeForce RTX 5090", 209.5e12),
    # AMD CDNA: Instinct data sheets. torch sees each of the two dies of an MI250X.
    Accelerator(r"Instinct MI210", 181e12),
    Accelerator(r"Instinct MI250X( / MI250)?", 191.5e12),
    Accelerator(r"Instinct (MI300X|MI325X)( OAM)?", 1307.4e12, name="MI300X", memory=192e9, bandwidth=5.3e12),
)


ACCELERATORS = {one.name: one for one in _DEVICES if one.name}
"""Accelerators for which a plan can be made, by name."""


def accelerator_named(device_name: str) -> Accelerator | None:
    """Return the data sheet of the device with torch's `device_name`; None if it is unknown."""
    name = re.sub(r"^(NVIDIA|Tesla|AMD) ", "", device_name.strip())
    return next((device for device in _DEVICES if re.fullmatch(device.devices, name)), None)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of the device with torch's `device_name`; None if unknown or if `dtype` is not bfloat16."""
    sheet = accelerator_named(device_name)
    return sheet.flops if sheet and dtype == "bfloat16" else None

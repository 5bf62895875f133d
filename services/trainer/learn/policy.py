"""A Hugging Face causal language model that scores chosen tokens of a packed row: log-probabilities, entropies and values.

`Policy.forward` calls backbone, output head and value head. With sharded weights, no other code may call them, because FSDP
gathers the heads' weights only when `forward` begins.

Logits are computed only at sampled positions. With a plain linear output head, this module computes them in blocks: a block has
the logits of all tokens for a range of the vocabulary. The backward pass computes each block again, unless a single block has
the whole vocabulary. A model with another head, or with soft-capped or scaled logits, computes its logits itself.

Not supported: a sharded vocabulary, gradients of gradients, top-p and top-k. Training data must be sampled without top-p and
top-k, because log π is always that of the full distribution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from pipelinerl.errors import FieldError, first_line
from services.trainer.learn.attention import VARLEN, RowPart, forward_arguments, on_device
from services.trainer.learn.batch import TokenRow, token_row

MAX_LOGITS = 2**25
"""Maximum number of logits (tokens × vocabulary entries) in a block. A float32 block has up to 128 MiB."""
MAX_LOGITS_ON_GPU = 2**27
"""`MAX_LOGITS` for GPUs: 512 MiB per block, for fewer and larger kernels."""
ALIGNED_WORDS = 128
"""A block of more vocabulary entries than this has a multiple of this number, for faster GPU kernels. The last may differ."""
PROBE_LENGTHS = (7, 5)
SIXTEEN_BIT = (torch.bfloat16, torch.float16)


class TokenScores(NamedTuple):
    """Scores of C tokens, float32[C] each. `logprobs`, `entropy`: at the caller's temperature, in nats. `values`: the learned
    baseline v_φ, predicted from the tokens before each token, in units of the reward; None without a value head."""

    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None = None


class Policy(nn.Module):
    """A model on its device that scores packed rows. Call `scores`, not `forward`. `own_logits`: the model computes its logits
    itself. `float32_head`: compute a 16-bit model's logits in float32."""

    def __init__(self, model: PreTrainedModel, attention: str, *, own_logits: bool = False, float32_head: bool = True) -> None:
        super().__init__()
        self.model = model
        self.attention = attention
        self.float32_head, self.own_logits = float32_head, False
        if own_logits:
            self.leave_logits_to_model()
        self.value_head: nn.Linear | None = None
        self.device: torch.device = model.device
        self.max_logits: int | None = None
        self.compiled_head = False
        self.part: RowPart | None = None
        """This rank's part of each row; None if each rank has whole rows."""
        self.may_share_prompts = False

    def leave_logits_to_model(self) -> None:
        self.own_logits = True
        head = self.model.get_output_embeddings()
        if self.float32_head and type(head) is nn.Linear and head.weight.dtype in SIXTEEN_BIT:
            head.__class__ = Float32Head

    @property
    def vocab_size(self) -> int:
        return self.model.get_output_embeddings().weight.shape[0]

    @property
    def row_multiple(self) -> int:
        """A row's length in tokens must be a multiple of this number."""
        return 1 if self.part is None else self.part.ranks

    @property
    def shares_prompts(self) -> bool:
        """Return whether the branches in a row may share prompts. They may not if ranks share rows."""
        return self.may_share_prompts and self.part is None

    def scores(
        self, row: TokenRow, predictors: Tensor, targets: Tensor, temperature: float = 1.0, entropy_grad: bool = False
    ) -> TokenScores:
        """Return scores of `targets` (int64[C]), each predicted at the row position in `predictors` (int64[C]). Ranks that
        share a row must call this together, with ascending `predictors`."""
        if self.part is None:
            scores: TokenScores = self(row, predictors, targets, temperature, entropy_grad)
            return scores
        part, length = self.part, row.input_ids.shape[1]
        counts = part.counts(length, predictors, row.predictors)
        first, tokens = sum(counts[: part.index]), part.tokens(length)
        own = slice(first, first + counts[part.index])
        own_row = TokenRow(row.input_ids[:, tokens], row.position_ids[:, tokens], replace(row.layout, part=part))
        scores = self(own_row, predictors[own] - tokens.start, targets[own], temperature, entropy_grad)
        there = torch.stack([one for one in scores if one is not None])
        return TokenScores(*part.collected(there, counts))

    def forward(
        self, row: TokenRow, predictors: Tensor, targets: Tensor, temperature: float, entropy_grad: bool
    ) -> TokenScores:
        """Return scores for this rank's part of the row."""
        arguments: dict[str, Any] = {
            "input_ids": row.input_ids,
            "position_ids": row.position_ids,
            "use_cache": False,
            **forward_arguments(self.attention, row.layout),
        }
        if self.own_logits:
            logits = self.model(**arguments, logits_to_keep=predictors).logits[0]
            return token_scores(logits, targets, temperature, entropy_grad)
        hidden = self.model.base_model(**arguments).last_hidden_state[0].index_select(0, predictors)
        output, how = self.model.get_output_embeddings(), (self.max_logits, not self.float32_head, self.compiled_head)
        head = Head(hidden, output.weight, output.bias, targets, temperature, *how)
        scores = TokenScores(*linear_scores(head, entropy_grad))
        if self.value_head is None:
            return scores
        values = self.value_head(hidden.to(self.value_head.weight.dtype))
        return scores._replace(values=values.float().sum(1))  # `sum` drops the single column; FSDP would warn about a view

    @torch.no_grad()
    def sequence_logprobs(self, token_ids: np.ndarray) -> np.ndarray:
        """Return float32[tokens - 1] for int[tokens]: log π(token[i] | token[:i]) in nats for i >= 1, at temperature 1."""
        tokens = np.asarray(token_ids, dtype=np.int64)
        row = token_row(tokens, np.array([len(tokens)]), self.row_multiple, self.device)
        predictors = torch.arange(len(tokens) - 1, device=self.device)
        # Compiled layers would be recompiled for a pass without gradients, which is not worth it for a few sequences.
        with torch.compiler.set_stance("force_eager"):
            logprobs = self.scores(row, predictors, row.input_ids[0, 1 : len(tokens)]).logprobs.cpu().numpy()
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # some modules keep gathered weights for a backward pass, but none follows here
        return logprobs


def add_value_head(policy: Policy) -> None:
    """Add a value head that predicts 0 at first. Raises `FieldError` if the model has no plain output head."""
    model = policy.model
    if policy.own_logits:
        fix = f"needs a model with a plain output head, and {type(model).__name__} has none; use another baseline"
        raise FieldError("algorithm.advantage", "value", fix)
    with torch.device(model.device):
        policy.value_head = nn.Linear(model.config.get_text_config().hidden_size, 1, dtype=torch.float32)
    nn.init.zeros_(policy.value_head.weight)
    nn.init.zeros_(policy.value_head.bias)


def checked_policy(model: PreTrainedModel, attention: str, float32_head: bool) -> Policy:
    """Return a policy with `attention`, after comparing its scores of two short packed sequences with those of each sequence
    alone. Raises `FieldError` if the attention is not available, or if the scores differ."""
    try:
        model.set_attn_implementation(attention)
    except (ImportError, ValueError) as error:
        raise FieldError("model.attention", attention, f"not available here: {first_line(error)}") from error
    # Soft capping hardly changes the small logits of an untrained model, so the configuration decides, not a measurement.
    caps_logits = getattr(model.config.get_text_config(), "final_logit_softcapping", None) is not None
    own_logits = caps_logits or not is_plain_linear(model.get_output_embeddings()) or model.base_model is model
    policy = Policy(model, attention, own_logits=own_logits, float32_head=float32_head)
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.25  # nats between two ways to compute a log-probability
    if _packing_error(policy) > tolerance:
        policy.leave_logits_to_model()
        if (off := _packing_error(policy)) > tolerance:
            fix = f"{type(model).__name__} scores packed sequences up to {off:.2g} nats differently from each sequence alone; "
            fix += "use another architecture" if attention == "eager" else "try sdpa or eager, or another architecture"
            raise FieldError("model.attention", attention, fix)
    policy.may_share_prompts = attention == VARLEN and _packing_error(policy, shared=3) <= tolerance
    return policy


@torch.no_grad()
def _packing_error(policy: Policy, shared: int = 0) -> float:
    """Return the largest difference in log-probabilities, in nats, between two packed sequences and each one alone. They begin
    with the same `shared` tokens, which the packed row has only once."""
    generator = np.random.default_rng(0)
    first, second = (generator.integers(0, policy.vocab_size, size=length) for length in PROBE_LENGTHS)
    second[:shared] = first[:shared]
    own = np.arange(len(first), len(first) + len(second) - shared)
    places = np.concatenate((np.arange(len(first)), np.arange(shared), own))
    tokens = np.concatenate((first, second[shared:]))
    row = token_row(tokens, np.array(PROBE_LENGTHS), places=places, device=policy.device)
    predictors = on_device(np.delete(places, [len(first) - 1, len(places) - 1]), policy.device)
    targets = on_device(np.concatenate((first[1:], second[1:])), policy.device)
    packed = policy.scores(row, predictors, targets).logprobs
    return float((packed - torch.cat([_plain_logprobs(policy, probe) for probe in (first, second)])).abs().max())


def _plain_logprobs(policy: Policy, tokens: np.ndarray) -> Tensor:
    ids = torch.from_numpy(tokens)[None].to(policy.device)
    policy.model.set_attn_implementation("eager")
    try:
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, :-1]
    finally:
        policy.model.set_attn_implementation(policy.attention)
    return token_scores(logits, ids[0, 1:], temperature=1.0).logprobs


def without_gradient(policy: Policy) -> str:
    """Return the name of a module with trainable weights whose outputs have no gradient; "" if there is none. The code of some
    mixtures of experts drops the gradient in evaluation mode."""
    lost, names = [""], {module: name for name, module in policy.model.named_modules()}

    def look(module: nn.Module, _: Any, output: Any) -> None:
        tensors = [one for one in (output if isinstance(output, tuple) else (output,)) if torch.is_tensor(one)]
        found = [one.requires_grad for one in tensors if one.is_floating_point()]
        if found and not any(found) and any(one.requires_grad for one in module.parameters(recurse=False)):
            lost.append(names[module])

    hooks = [module.register_forward_hook(look) for module in names]
    _plain_logprobs(policy, np.arange(8) % policy.vocab_size)
    for hook in hooks:
        hook.remove()
    return lost[-1]


def wide_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Return left [n, k] · right [k, m], in float32 if both are 16-bit tensors."""
    if left.dtype not in SIXTEEN_BIT:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)


class _WideProduct(torch.autograd.Function):
    """hidden · weightᵀ in float32, for hidden [C, width] and weight [V, width] in 16 bits. Gradients have 16 bits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return wide_product(hidden, weight.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        narrow = gradient.to(weight.dtype)
        wanted = ctx.needs_input_grad
        return narrow @ weight if wanted[0] else None, narrow.t() @ hidden if wanted[1] else None


class Float32Head(nn.Linear):
    """A 16-bit head with float32 logits, for a model that computes its logits itself."""

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = _WideProduct.apply(hidden.flatten(0, -2), self.weight)
        logits = logits if self.bias is None else logits + self.bias
        return logits.unflatten(0, hidden.shape[:-1])


def is_plain_linear(head: nn.Module) -> bool:
    """Return whether `head` is a plain `nn.Linear` or `Float32Head`, without hooks and with its `forward` unpatched."""
    hooks = (head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks)
    return type(head) in (nn.Linear, Float32Head) and not any(hooks) and "forward" not in vars(head)


def token_scores(logits: Tensor, targets: Tensor, temperature: float, entropy_grad: bool = False) -> TokenScores:
    """Return scores of `targets` (int64[C]) under `logits` [C, vocabulary]. Entropy has a gradient only with `entropy_grad`."""
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    log_distribution = torch.log_softmax(scaled, dim=-1)
    logprobs = log_distribution.gather(-1, targets[:, None]).sum(-1)
    source = log_distribution if entropy_grad else log_distribution.detach()
    # A masked word has logit -inf, and p · log p must then be 0.
    entropy = -(source.exp() * source.clamp(min=torch.finfo(source.dtype).min)).sum(-1)
    return TokenScores(logprobs, entropy)


@dataclass(frozen=True, eq=False)
class Head:
    """A linear output head at C >= 0 tokens for V vocabulary entries (words): softmax((hidden · weightᵀ + bias) / temperature).
    `hidden` [C, width], `weight` [V, width] and `bias` [V] share a dtype. Logits are float32; float64 for float64 inputs."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    """int64[C]: the vocabulary entry that is scored at each token."""
    temperature: float = 1.0
    max_logits: int | None = None
    """Maximum number of logits in a block; None = `MAX_LOGITS`, on a GPU `MAX_LOGITS_ON_GPU`."""
    rounded: bool = False
    """Round logits to the inputs' dtype, as the head itself would."""
    compiled: bool = False
    """Have torch compile the computation of a block, if gradients are needed."""

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.hidden.dtype, torch.float32)

    def blocks(self) -> list[slice]:
        words, tokens = self.weight.shape[0], max(1, len(self.hidden))
        most = self.max_logits or (MAX_LOGITS_ON_GPU if self.hidden.is_cuda else MAX_LOGITS)
        size = max(1, most // tokens)
        size = min(words, size - size % ALIGNED_WORDS if size > ALIGNED_WORDS else size)
        return [slice(first, min(first + size, words)) for first in range(0, words, size)]

    def buffer(self) -> Tensor:
        words = self.blocks()[0].stop
        return torch.empty(len(self.hidden) * words, dtype=self.dtype, device=self.hidden.device)

    def view(self, buffer: Tensor, words: slice) -> Tensor:
        """Return the beginning of `buffer` as [C, words of the block]."""
        shape = (len(self.hidden), words.stop - words.start)
        return buffer[: shape[0] * shape[1]].view(shape)

    def logits(self, words: slice, buffer: Tensor) -> Tensor:
        """Compute the logits [C, words of the block], divided by the temperature, in `buffer`."""
        rows, out = self.weight[words].t(), self.view(buffer, words)
        if self.rounded:
            out.copy_(self.hidden @ rows if self.bias is None else torch.addmm(self.bias[words], self.hidden, rows))
        else:
            wide_product(self.hidden, rows, out)
            if self.bias is not None:
                out.add_(self.bias[words])
        return out if self.temperature == 1.0 else out.div_(self.temperature)

    def place(self, words: slice) -> tuple[Tensor, Tensor]:
        """Return, for each token, its target's index in the block (0 if the block lacks it), and whether the block has it."""
        index = self.targets - words.start
        inside = (index >= 0) & (index < words.stop - words.start)
        return torch.where(inside, index, 0), inside


def linear_scores(head: Head, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
    """Return (log-probabilities of the head's targets, entropies) in nats, [C] each, in the dtype of the logits. Entropies have
    a gradient only with `entropy_grad`."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (head.hidden, head.weight, head.bias)):
        logprobs, entropy = _LinearScores.apply(head.hidden, head.weight, head.bias, head, entropy_grad)
        return logprobs, entropy
    return _scan(replace(head, compiled=False))[:2]


def _scan(head: Head) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return log-probabilities, entropies and log-normalisers, [C] each, and the logits [C, V] if there is only one block. A
    logit minus its log-normaliser is log p."""
    blocks = head.blocks()
    buffer = head.buffer()
    scratch = None if head.compiled else head.buffer()
    chosen = head.hidden.new_zeros(len(head.hidden), dtype=head.dtype)
    found = []
    for words in blocks:
        logits = head.logits(words, buffer)
        index, inside = head.place(words)
        chosen = torch.where(inside, logits.gather(1, index[:, None])[:, 0], chosen)
        found.append(_compiled(_sums)(logits) if scratch is None else _sums(logits, logits, head.view(scratch, words)))
    largest, sums, weighted = (torch.stack(part) for part in zip(*found, strict=True))
    peak = largest.amax(0)
    shift = largest - peak
    scale = shift.exp()
    total = (scale * sums).sum(0)
    log_total = total.log()
    kept = head.view(buffer, blocks[0]) if len(blocks) == 1 else None
    # If not compiled, `_sums` has subtracted the maximum from the single block's logits in place.
    log_normaliser = log_total if kept is not None and not head.compiled else peak + log_total
    entropy = log_total - (scale * (weighted + shift * sums)).sum(0) / total
    return chosen - peak - log_total, entropy, log_normaliser, kept


def _sums(logits: Tensor, shifted: Tensor | None = None, scratch: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Return m = max z, Σ exp(z − m) and Σ exp(z − m) · (z − m) of each token's logits z. `shifted`, `scratch`: memory of the
    logits' shape; `shifted` may be `logits`. Compiled code needs neither."""
    largest = logits.amax(1)
    shifted = torch.sub(logits, largest[:, None], out=shifted)
    exponentials = torch.exp(shifted, out=scratch)
    total = exponentials.sum(1)
    return largest, total, torch.mul(exponentials, shifted, out=scratch).sum(1)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


class _LinearScores(torch.autograd.Function):
    """`linear_scores` with its gradient: d loss / dz = −g · dp − h · p · (log p + entropy), for z = logits / temperature and
    p = softmax(z). dp is p − 1 for the target, else p. g = d loss / d log p of the target, h = d loss / d entropy."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, head: Head, entropy_grad: bool
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_normaliser, kept = _scan(head)
        ctx.options, ctx.entropy_grad = (head.temperature, head.max_logits, head.rounded, head.compiled), entropy_grad
        ctx.save_for_backward(hidden, weight, bias, head.targets, log_normaliser, entropy, kept)
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, log_normaliser, entropy, kept = ctx.saved_tensors
        head = Head(hidden, weight, bias, targets, *ctx.options)
        wanted = ctx.needs_input_grad
        summed = torch.zeros_like(hidden, dtype=head.dtype) if wanted[0] else None  # sum over blocks in float32
        of_weight = torch.empty_like(weight) if wanted[1] else None
        of_bias = torch.empty_like(bias) if wanted[2] else None
        g, h = (grad / head.temperature for grad in (grad_logprobs, grad_entropy))
        spread, buffer = (h, entropy) if ctx.entropy_grad else None, head.buffer()
        for words in head.blocks():
            logits = head.logits(words, buffer) if kept is None else kept
            index, inside = head.place(words)
            given = (logits, log_normaliser, g, index, torch.where(inside, g, 0), spread, hidden.dtype)
            of_logits = _compiled(_gradient)(*given) if head.compiled else _gradient(*given, head.view(buffer, words))
            if summed is not None and summed.dtype == of_logits.dtype:
                summed.addmm_(of_logits, weight[words])
            elif summed is not None:
                summed.add_(of_logits @ weight[words])
            if of_weight is not None:
                torch.mm(of_logits.t(), hidden, out=of_weight[words])
            if of_bias is not None:
                torch.sum(of_logits, 0, out=of_bias[words])
        return None if summed is None else summed.to(hidden.dtype), of_weight, of_bias, None, None


def _gradient(
    logits: Tensor,  # [C, words]: log p + log_normaliser
    log_normaliser: Tensor,  # [C]
    g: Tensor,  # [C]; like h, already divided by the temperature
    index: Tensor,  # [C]: the target's index in the block
    of_target: Tensor,  # [C]: g, or 0 if the block lacks the target
    spread: tuple[Tensor, Tensor] | None,  # h and entropy; None if entropy has no gradient
    dtype: torch.dtype,
    out: Tensor | None = None,  # memory for the result, which may be `logits`; None in compiled code
) -> Tensor:
    """Return the gradient [C, words] of `_LinearScores` for a block's logits before the division by the temperature, in
    `dtype`: −p · (g + h · (log p + entropy)), with `of_target` added at `index`."""
    log_p = torch.sub(logits, log_normaliser[:, None], out=out)
    if spread is None:
        wide = torch.mul(torch.exp(log_p, out=out), -g[:, None], out=out)
    else:
        h, entropy = spread
        p = log_p.exp()
        factor = torch.mul(torch.add(log_p, entropy[:, None], out=out), -h[:, None], out=out)
        wide = torch.mul(torch.sub(factor, g[:, None], out=out), p, out=out)
    if out is not None:
        return wide.scatter_add_(1, index[:, None], of_target[:, None]).to(dtype)
    at_target = torch.arange(logits.shape[1], device=logits.device) == index[:, None]
    return (wide + torch.where(at_target, of_target[:, None], 0.0)).to(dtype)

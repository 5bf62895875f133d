"""The learner on a device: the kernels of 16 bit, NCCL ranks, figures of a step, and a host that does not wait."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.service.settings import RankSettings
from services.trainer.learn.attention import PackedLayout, varlen_attention
from services.trainer.learn.batch import host_microbatch
from services.trainer.learn.meter import PhaseTimer, take_memory_peak
from services.trainer.learn.policy import Head, linear_scores
from services.trainer.loading import load_learner, sharded_learner
from services.trainer.world import join_ranks, leave_ranks
from tests.support.learner import model_of, sequences_of
from tests.unit.ranks import on_ranks
from tests.unit.test_learner import assert_near, step_on
from tests.unit.test_ranks import Job, Result, same, train

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
LONG = 2_000_000_000
"""Cycles: about a second."""


def test_the_flash_kernel_agrees_with_padded_rows_and_needs_none() -> None:
    torch.manual_seed(0)
    lengths = np.array([300, 120, 77, 5])
    shapes = [(1, heads, int(lengths.sum()), 64) for heads in (8, 2, 2)]
    query, key, value = (torch.randn(shape, device="cuda") for shape in shapes)
    exact, _ = varlen_attention(torch.nn.Identity(), query, key, value, None, packed=PackedLayout(lengths, "cuda"))
    half, layout = [x.bfloat16() for x in (query, key, value)], PackedLayout(lengths, "cuda")
    flash, _ = varlen_attention(torch.nn.Identity(), *half, None, packed=layout)
    torch.testing.assert_close(flash.float(), exact, rtol=0, atol=0.03)
    assert "padded" not in vars(layout)
    # The second of two sequences begins with 100 tokens of the first.
    places = np.concatenate((np.arange(300), np.arange(100), np.arange(300, 320)))
    shared = PackedLayout(np.array([300, 120]), "cuda", places)
    exact, _ = varlen_attention(torch.nn.Identity(), *(x[:, :, :320] for x in (query, key, value)), None, packed=shared)
    flash, _ = varlen_attention(torch.nn.Identity(), *(x[:, :, :320] for x in half), None, packed=shared)
    torch.testing.assert_close(flash.float(), exact, rtol=0, atol=0.03)


@pytest.mark.parametrize("max_logits", [2**20, 2**30], ids=["blocks", "one block"])
def test_compiled_blocks_of_logits_have_the_scores_and_gradients_of_the_others(max_logits: int) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(rows, 64, device="cuda").bfloat16().requires_grad_() for rows in (1000, 5003))
    targets, upstream = torch.randint(0, 5003, (1000,), device="cuda"), torch.randn(2, 1000, device="cuda")
    found = []
    for compiled in (False, True):
        scores = linear_scores(Head(hidden, weight, None, targets, 1.3, max_logits, False, compiled), True)
        found.append([*scores, *torch.autograd.grad((torch.stack(scores) * upstream).sum(), (hidden, weight))])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("family", ["llama-tied", "qwen2-untied"])
@pytest.mark.parametrize(("dtype", "share"), [(torch.float32, 1e-3), (torch.bfloat16, 0.05)])
def test_a_step_on_the_device_is_near_that_of_float32_on_the_host(family: str, dtype: torch.dtype, share: float) -> None:
    assert_near(step_on("cuda", dtype, family), step_on("cpu", torch.float32, family), share)


def test_a_micro_batch_goes_to_the_device_while_that_is_busy() -> None:
    """64 Ki tokens, more than a driver takes into its own memory."""
    sequences = sequences_of([(2, 2**14 - 2)] * 4)
    batch = host_microbatch(sequences, np.ones(4), np.ones(4), 0)
    batch.on("cuda")
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(LONG)
    done.record()
    there = batch.on("cuda")
    assert not done.query()
    assert there.targets.cpu().tolist() == batch.targets.tolist()


def test_a_phase_is_the_devices_time_and_the_host_does_not_wait() -> None:
    timer = PhaseTimer(lambda: torch.cuda.Event(enable_timing=True))
    with timer.measure("optimizer"):
        torch.cuda._sleep(LONG)
    assert timer.take() == {}
    torch.cuda.synchronize()
    assert timer.take()["optimizer"] > 0.2


def test_the_peak_of_memory_is_that_since_it_was_last_asked() -> None:
    device = torch.device("cuda")
    take_memory_peak(device)
    held = torch.ones(2**28, dtype=torch.uint8, device="cuda")
    del held
    assert take_memory_peak(device) >= 2**28
    assert take_memory_peak(device) < 2**28


def on_one_rank(job: Job) -> Result:
    model_of("llama-tied", max_position_embeddings=64).save_pretrained(job.folder)
    result = train(load_learner(job.recipe(), job.folder, RankSettings()), job)
    assert result is not None
    return result


@pytest.mark.parametrize("every_gpu", [False, True], ids=["one rank", "all GPUs"])
def test_ranks_over_nccl_train_as_one(every_gpu: bool, tmp_path: Path) -> None:
    size = torch.cuda.device_count() if every_gpu else 1
    if every_gpu and size == 1:
        pytest.skip("one GPU")
    job = Job(str(tmp_path))
    same(on_one_rank(job), on_ranks(size, _train_sharded, job)[0], atol=1e-4)


def test_sharded_sixteen_bit_is_near_float32(tmp_path: Path) -> None:
    """bf16 products on sharded float32 weights: losses and figures of two steps."""
    exact = on_one_rank(Job(str(tmp_path)))
    half = on_ranks(torch.cuda.device_count(), _train_sharded, Job(str(tmp_path), model={"dtype": "bfloat16"}))[0]
    for left, right in zip(exact.outcomes, half.outcomes, strict=True):
        assert right["skipped"] == ""
        assert right["loss"] == pytest.approx(left["loss"], rel=0.1, abs=0.05)
        assert right["entropy"] == pytest.approx(left["entropy"], rel=0.05)


def _train_sharded(job: Job) -> Result | None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    join_ranks(device)
    result = train(sharded_learner(job.recipe(), job.folder, device), job)
    leave_ranks()
    return result

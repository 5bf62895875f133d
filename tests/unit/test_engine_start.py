"""An engine is built on a thread: the loop goes on, and a stop ends what was begun; what its steps and its work take."""

import asyncio
import multiprocessing
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, MagicMock, call

import numpy as np
import pytest

from pipelinerl.errors import FieldError, TransferError
from pipelinerl.messages.sequences import PolicyVersion
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.lifecycle import StartStopped
from services.actor import metrics as actor_metrics
from services.actor import vllm_engine
from services.actor.engine import EngineError
from services.actor.metrics import BusyClock
from services.actor.vllm_engine import build_llm, build_off_loop, engine_arguments, use_known_model_infos
from services.actor.weight_sync.client import CommitFailed, WeightUpdateClient, WorkerLink
from tests.unit.builders import make_recipe, write_weights


async def test_the_loop_goes_on_meanwhile_and_hears_of_a_failure() -> None:
    go = threading.Event()
    asyncio.get_running_loop().call_later(0.05, go.set)
    assert await build_off_loop(lambda: go.wait(60), asyncio.Event()) is True
    with pytest.raises(RuntimeError, match="no such model"):
        await build_off_loop(MagicMock(side_effect=RuntimeError("no such model")), asyncio.Event())


@pytest.mark.parametrize("fails_then", [True, False])
async def test_a_stop_ends_the_children_and_waits_for_the_thread(fails_then: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was built in spite of it is not lost."""
    stop, child_ends, ended = asyncio.Event(), threading.Event(), []
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [SimpleNamespace(terminate=child_ends.set)])

    def build() -> int:
        child_ends.wait(60)
        ended.append(True)
        if fails_then:
            raise RuntimeError("engine core initialization failed")
        return 7

    asyncio.get_running_loop().call_later(0.05, stop.set)
    async with asyncio.timeout(60):
        with pytest.raises(StartStopped) if fails_then else nullcontext():
            assert await build_off_loop(build, stop) == 7
    assert ended == [True]


@pytest.mark.parametrize(
    ("model", "override"),
    [
        ({"dtype": "float32"}, None),
        ({"dtype": "bfloat16"}, {"head_dtype": "float32"}),
        ({"dtype": "bfloat16", "head_dtype": "model"}, None),
    ],
)
def test_an_engine_in_sixteen_bits_computes_logits_in_float32(model: dict[str, str], override: object) -> None:
    recipe = make_recipe(model={"source": "path", "name": "nowhere", "max_context": 64, **model})
    assert engine_arguments(recipe, "nowhere", gpu_gib=80.0).get("hf_overrides") == override


@pytest.mark.parametrize(
    ("parameters", "overrides", "share", "warned"),
    [
        (494_032_768, (), 0.9, False),
        # 14.16 GiB of weights and 2 for receiving: 1 - 16.16 / 80 = 0.798.
        (7_600_000_000, (), 0.79, False),
        (7_600_000_000, ("trainer.lora.rank=16",), 0.9, False),
        # Two instances of 37.3 GiB and 5 do not fit 80 GiB, so that updates are loaded while the engine is paused.
        (20_000_000_000, (), 0.9, True),
        (7_600_000_000, ("actor.engine.quantization=fp8",), 0.9, False),
        (0, (), 0.9, False),
    ],
)
def test_a_share_that_no_placement_has_set_leaves_room_for_weight_updates(
    parameters: int,
    overrides: tuple[str, ...],
    share: float,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(vllm_engine, "hub_parameters", lambda _: parameters)
    recipe = load_recipe("gsm8k", ["actor.engine.gpu_memory_utilization=auto", "trainer.learning_rate=1e-5", *overrides])
    assert engine_arguments(recipe, "a/model", gpu_gib=80.0)["gpu_memory_utilization"] == share
    assert ("too little GPU memory" in caplog.text) == warned
    write_weights(tmp_path / "model.safetensors", w=(2, 3))
    assert engine_arguments(recipe, str(tmp_path), gpu_gib=80.0)["gpu_memory_utilization"] == 0.9, "a folder tells its size"
    given = load_recipe("gsm8k", ["actor.engine.gpu_memory_utilization=0.5"])
    assert engine_arguments(given, "a/model", gpu_gib=80.0)["gpu_memory_utilization"] == 0.5
    assert "gpu_memory_utilization" not in engine_arguments(recipe, "a/model", gpu_gib=None)


async def test_an_engine_sleeps_where_vllm_can_and_goes_on_after_a_failed_commit() -> None:
    llm = AsyncMock()
    client = WeightUpdateClient(llm)
    await client.sleep()
    await client.wake()
    assert llm.mock_calls == [call.sleep(level=1, mode="keep"), call.wake_up()]
    llm.update_weights.side_effect = RuntimeError("nothing is staged")
    with pytest.raises(TransferError, match="cannot be committed"):
        await client.commit(PolicyVersion(1, 2))
    assert llm.mock_calls[-1] == call.resume_generation()
    llm.sleep.side_effect = llm.wake_up.side_effect = RuntimeError("broken")
    for change in (client.sleep, client.wake):
        with pytest.raises(CommitFailed, match="cannot fall asleep or wake up: broken"):
            await change()
    colocated = make_recipe(mode="conventional", actor={"colocate": True})
    assert engine_arguments(colocated, "nowhere", gpu_gib=80.0)["enable_sleep_mode"]
    with pytest.raises(FieldError, match=r"actor\.colocate = True: needs vLLM's sleep mode, which this build for cpu lacks"):
        build_llm(colocated, "nowhere", lambda: False)


def test_no_two_engines_draw_the_same_random_numbers() -> None:
    """vLLM's model runner V2 seeds the n-th request without a seed with the n-th number that NumPy draws from the engine's."""
    seeds = [engine_arguments(make_recipe(seed=3), "nowhere", gpu_gib=80.0)["seed"] for _ in range(3)]
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len({np.random.RandomState(seed).randint(2**62) for seed in seeds}) == 3


@pytest.mark.parametrize(
    ("logprobs", "end", "scored", "says"),
    [
        ([-1.0, -2.0], 2, [-1.0], None),
        ([-1.0, float("nan")], 2, [-1.0], "cannot be used: non_finite_logprobs"),
        ([-1.0, -2.0], 1, [-1.0], "cannot be used: version_spans: cover 1 of 2 tokens"),
        ([-1.0], 2, [-1.0], "1 log-probabilities for 2 tokens"),
        ([-1.0, -2.0], 2, [float("nan")], "cannot be used: non-finite scores"),
    ],
)
async def test_an_engine_whose_first_results_no_trainer_could_use_does_not_start(
    logprobs: list[float], end: int, scored: list[float], says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = SimpleNamespace(
        token_ids=[1, 2],
        logprobs=SimpleNamespace(logprobs=logprobs, start_indices=range(len(logprobs))),
        finish_reason="length",
        weight_versions=[SimpleNamespace(version="default", start=0, end=end)],
    )
    monkeypatch.setattr(vllm_engine, "vllm_sampling", MagicMock())
    engine = vllm_engine.VllmEngine(MagicMock(), MagicMock())
    monkeypatch.setattr(engine, "_run", AsyncMock(return_value=SimpleNamespace(outputs=[output])))
    monkeypatch.setattr(engine, "score", AsyncMock(return_value=np.array(scored)))
    with pytest.raises(EngineError, match=says) if says else nullcontext():
        await engine.warm_up(make_recipe())


async def test_an_engine_that_ends_leaves_no_folder_of_its_weight_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "build_llm", MagicMock())
    monkeypatch.setattr(vllm_engine.VllmEngine, "warm_up", AsyncMock())
    async with vllm_engine.start_engine(make_recipe(), "nowhere") as engine:
        engine.weights._link = link = WorkerLink(num_workers=1)
        await link.listen()
        assert Path(link.path).is_socket()
    assert not Path(link.path).parent.exists()


async def test_a_stop_is_heard_while_an_engine_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = asyncio.Event()

    async def without_end(*_: object) -> None:
        stop.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(vllm_engine, "build_llm", MagicMock())
    monkeypatch.setattr(vllm_engine.VllmEngine, "warm_up", without_end)
    async with asyncio.timeout(60):
        with pytest.raises(StartStopped):
            async with vllm_engine.start_engine(make_recipe(), "nowhere", stop):
                raise AssertionError("it was never warm")


def test_a_new_cache_begins_with_the_images_model_infos_and_another_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, cache = tmp_path / "image", tmp_path / "cache"
    use_known_model_infos(image, cache)  # an installation without any
    assert not cache.exists()
    (image / "modelinfos").mkdir(parents=True)
    (image / "modelinfos" / "llama.json").write_text("1")
    use_known_model_infos(image, cache)
    (image / "modelinfos" / "llama.json").write_text("2")
    use_known_model_infos(image, cache)
    assert (cache / "modelinfos" / "llama.json").read_text() == "1"
    assert [path.name for path in cache.iterdir()] == ["modelinfos"]
    monkeypatch.setattr(shutil, "copytree", MagicMock(side_effect=OSError("no space left")))
    use_known_model_infos(image, tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


def test_busy_is_the_time_with_anything_in_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, busy = SimpleNamespace(now_s=10.0), BusyClock()
    monkeypatch.setattr(actor_metrics.time, "monotonic", lambda: clock.now_s)
    with busy:
        clock.now_s = 11.0
        with busy:
            clock.now_s = 13.0
        clock.now_s = 14.0
        assert busy.total_s == 4.0
    clock.now_s = 20.0
    assert busy.total_s == 4.0
    with busy:
        clock.now_s = 21.0
        assert busy.total_s == 5.0


SIGNALLED_CHILD = """
import asyncio, multiprocessing, signal, time
from services.actor.vllm_engine import prepare_forks

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    prepare_forks()
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    child = context.Process(target=lambda: (begun.set(), time.sleep(600)))
    await asyncio.to_thread(child.start)
    await asyncio.to_thread(begun.wait, 60)
    child.terminate()
    await asyncio.to_thread(child.join, 30)
    for _ in range(5):
        await asyncio.sleep(0)  # the loop reads its wake-up socket and runs the handler
    print(child.exitcode, stop.is_set())
    child.kill()

asyncio.run(main())
"""


def test_a_signal_to_a_forked_engine_process_ends_it_and_does_not_stop_the_actor() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED_CHILD], capture_output=True, text=True, timeout=600, check=False)
    assert done.stdout == "-15 False\n", done.stderr

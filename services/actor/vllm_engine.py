"""vLLM's AsyncLLM behind the `InferenceEngine` protocol. In the actor, only this file and `weight_sync/` use vLLM."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from pipelinerl.errors import FieldError
from pipelinerl.messages.sequences import Completion, FinishReason, Logprobs, SamplingParams, TokenIds, VersionSpan
from pipelinerl.recipe.fields import VLLM_SHARE, Recipe
from pipelinerl.recipe.model_folder import hub_parameters, parameters_in
from pipelinerl.rl.groups import EVALUATION_SLOTS
from pipelinerl.rl.memory import GIB, Model, actor_problem, vllm_share
from pipelinerl.service.lifecycle import StartStopped, unless_stopped
from services.actor.engine import EngineError, GenerationRequest, OnStep, defect_of
from services.actor.weight_sync.client import WeightUpdateClient, parse_version

if TYPE_CHECKING:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerFactory


log = logging.getLogger(__name__)

_LOOK_S = 0.1
WARM_UP_TOKENS = 2
"""Tokens of each warm-up sequence. The prefill step samples the first token, and a decode step the second."""

_Built = TypeVar("_Built")


async def build_off_loop(build: Callable[[], _Built], stop: asyncio.Event) -> _Built:
    """Return the result of `build()`, which runs on a thread, so that the event loop keeps answering probes. If `stop` is set,
    terminate this process's children, which makes `build` fail, and raise `StartStopped`. If `build` succeeds nevertheless, its
    result is returned, and the caller must shut it down."""
    building = asyncio.ensure_future(asyncio.to_thread(build))
    try:
        with suppress(StartStopped):
            await unless_stopped(asyncio.wait((building,)), stop)
    finally:
        while not building.done():  # repeated, because `build` may start further processes
            for child in multiprocessing.active_children():
                child.terminate()
            await asyncio.wait((building,), timeout=_LOOK_S)
    if stop.is_set() and building.exception() is not None:
        raise StartStopped("stopped before the engine was up") from building.exception()
    return building.result()


def engine_arguments(recipe: Recipe, model: str, gpu_gib: float | None) -> dict[str, Any]:
    """Return the vLLM engine arguments of a recipe. `gpu_gib`: memory of each GPU; None on a CPU."""
    engine, on_gpu = recipe.actor.engine, gpu_gib is not None
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": recipe.model.dtype,
        # vLLM uses this seed for requests without their own. With a fixed seed, all actors would draw equal samples.
        "seed": secrets.randbits(32),
        "max_model_len": recipe.model.max_context,
        "max_num_seqs": recipe.actor.sequences_in_progress + EVALUATION_SLOTS,
        "tensor_parallel_size": engine.tensor_parallel_size,
        "trust_remote_code": recipe.model.trust_remote_code,
        "enforce_eager": engine.enforce_eager or not on_gpu,
        "enable_prefix_caching": True,  # prompts have salts, so that no request reads the cache of older weights
        "logprobs_mode": "processed_logprobs",  # of the sampling distribution, temperature included
        "generation_config": "vllm",
        "disable_log_stats": True,
        "weight_transfer_config": {"backend": "pipelinerl"},
        "revision": (recipe.model.revision if recipe.model.source == "hub" else "") or None,
        "max_num_batched_tokens": engine.max_batched_tokens or None,
        "quantization": engine.quantization or None,
    }
    if gpu_gib is not None:
        arguments["gpu_memory_utilization"] = memory_share(recipe, model, gpu_gib)
        arguments["enable_sleep_mode"] = recipe.actor.colocate
    else:
        arguments |= {
            "enable_chunked_prefill": False,  # this would reset seeded random generators, which fails on a CPU
            "kv_cache_memory_bytes": int(engine.kv_cache_gib * 1024**3),
            "block_size": 32,  # tokens; only whole blocks are shared, and many prompts are shorter than the CPU default of 128
        }
        if engine.tensor_parallel_size == 1:
            # Run model and scheduler in one process. On a CPU, vLLM would replace the executor "uni" with a worker process,
            # and wait for it in a busy loop that costs more than the model.
            from vllm.v1.executor.uniproc_executor import UniProcExecutor

            arguments["distributed_executor_backend"] = UniProcExecutor
    if recipe.model.dtype != "float32" and recipe.model.head_dtype == "float32":
        arguments["hf_overrides"] = {"head_dtype": "float32"}
    if recipe.trainer.lora is not None and recipe.trainer.lora.send == "adapter":
        arguments["additional_config"] = {"pipelinerl_lora": recipe.trainer.lora.model_dump()}
    return arguments


def memory_share(recipe: Recipe, model: str, memory_gib: float) -> float:
    """Return the share of a GPU of `memory_gib` that vLLM may take. If the recipe's `gpu_memory_utilization` is auto,
    leave the memory for weight updates free. If the model is too large for that, or its size unknown, return `VLLM_SHARE`."""
    if recipe.actor.engine.gpu_memory_utilization is not None:
        return recipe.actor.engine.memory_share
    folder = Path(model)
    if not (parameters := parameters_in(folder) if folder.is_dir() else hub_parameters(recipe.model)):
        return VLLM_SHARE
    served = Model.of(recipe, parameters)
    if (problem := actor_problem(recipe, served, memory_gib)) is not None:
        log.warning("vLLM leaves too little GPU memory for a weight update: %s", problem)
        return VLLM_SHARE
    return vllm_share(recipe, served, memory_gib)


@asynccontextmanager
async def start_engine(
    recipe: Recipe,
    model: str,
    stop: asyncio.Event | None = None,
    *,
    on_step: OnStep | None = None,
    bind_host: str | None = None,
) -> AsyncIterator[VllmEngine]:
    """Start vLLM on a thread, which takes tens of seconds, warm it up, and shut it down at the end.

    `on_step` is called on the event loop for each engine step after the warm-up. `bind_host`: address at which the other ranks
    of a transfer group reach this pod. Raises `EngineError` if vLLM cannot serve the model (vLLM's log says why), `FieldError`
    if vLLM lacks the sleep mode for `actor.colocate`, and `StartStopped` if `stop` is set first."""
    stop, listeners = stop or asyncio.Event(), list[OnStep]()
    folder, beside = tempfile.gettempdir(), tempfile.TemporaryDirectory(prefix="prl-", ignore_cleanup_errors=True)
    with beside as sockets:  # a directory with a short path, because a socket's path may have at most 107 characters
        is_private = stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        os.environ["VLLM_RPC_BASE_PATH"] = folder if is_private else sockets  # vLLM itself removes none of its sockets
        llm = await build_off_loop(lambda: build_llm(recipe, model, stop.is_set, listeners), stop)
        weights = WeightUpdateClient(
            llm, recompute_kv=recipe.weights.recompute_kv, bind_host=bind_host, staging_buffers=recipe.weights.staging_buffers
        )
        # vLLM's statistics per request take a quarter of its time on this event loop. Its statistics per step stay on.
        llm.log_stats = llm.output_processor.log_stats = False
        try:
            llm._run_output_handler()  # built off the loop, the engine would start this with the first request
            engine = VllmEngine(llm, weights)
            await unless_stopped(engine.warm_up(recipe), stop)
            if on_step is not None:
                listeners.append(on_step)
            yield engine
        finally:
            logging.getLogger("vllm.v1.utils").setLevel(logging.ERROR)  # it would warn of each process that is killed
            llm.shutdown(timeout=0)  # kill vLLM's processes, which have nothing to save; an orderly exit takes 2.5 s
            await weights.close()


def build_llm(recipe: Recipe, model: str, stopped: Callable[[], bool], listeners: Sequence[OnStep] = ()) -> AsyncLLM:
    """Start vLLM with its engine process. Blocks; use any thread. Raises `EngineError` or `FieldError` (see `start_engine`)."""
    # FlashInfer's sampler is only for top-p and top-k, which recipes do not have, and it compiles with nvcc at its first use.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    import torch
    from vllm import __version__, envs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    use_known_model_infos(Path(sys.prefix, "share", "vllm"), Path(envs.VLLM_CACHE_ROOT))
    on_cpu = current_platform.is_cpu()
    if recipe.actor.colocate and not (
        current_platform.is_sleep_mode_available() and current_platform.is_cumem_allocator_available()
    ):
        fix = f"needs vLLM's sleep mode, which this build for {current_platform.device_type} lacks; use false, or an NVIDIA GPU"
        raise FieldError("actor.colocate", True, fix)
    arguments = engine_arguments(recipe, model, None if on_cpu else current_platform.get_device_total_memory() / GIB)
    if stopped():  # the imports alone take seconds
        raise EngineError("stopped before vLLM was started")
    try:
        config = AsyncEngineArgs(**arguments).create_engine_config()
        if "distributed_executor_backend" in arguments and torch.get_num_threads() == 1:
            # Fork the engine process, as on a GPU, because a fork need not import everything again. On a CPU, vLLM would spawn
            # it, because a forked child cannot use its parent's pool of OpenMP threads. With one thread, there is no pool.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        prepare_forks()
        llm = AsyncLLM.from_vllm_config(config, stat_loggers=[step_logger(listeners)], disable_log_stats=True)
    except (RuntimeError, ValueError, OSError) as error:
        raise EngineError(f"vLLM does not start with model {model!r}: {error}") from error
    log.info("vLLM %s runs with its model runner V%d", __version__, 2 if llm.vllm_config.use_v2_model_runner else 1)
    return llm


@cache
def prepare_forks() -> None:
    """In every forked child, reset signal handlers and exempt inherited objects from garbage collection."""

    def in_child() -> None:
        gc.freeze()  # collecting inherited garbage could wait forever for threads that the child lacks
        signal.set_wakeup_fd(-1)  # a SIGTERM to the engine process would otherwise stop the actor
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=in_child)


def use_known_model_infos(image: Path, cache: Path) -> None:
    """Copy the container image's data on model classes to vLLM's cache if the cache has none. This saves vLLM 9 s."""
    known, target = image / "modelinfos", cache / "modelinfos"
    if not known.is_dir() or target.exists():
        return
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as beside:  # renamed when complete, since the actor may be killed meanwhile
            shutil.copytree(known, Path(beside, known.name)).rename(target)
    except OSError as error:
        log.warning("cannot copy the container image's model data to %s, so vLLM makes its own: %s", target, error)


def step_logger(listeners: Sequence[OnStep]) -> StatLoggerFactory:
    """Return a class of stat loggers that only call `listeners`. vLLM uses it in place of its own `PrometheusStatLogger`."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class StepLogger(PrometheusStatLogger):
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            self._running, self._at_s = False, 0.0

        def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
            if scheduler_stats is None:
                return
            running, now_s = scheduler_stats.num_running_reqs > 0, time.monotonic()
            if running or self._running:  # the scheduler also runs one step after the last sequence has ended
                for on_step in listeners:
                    on_step(now_s - self._at_s if self._running else None, scheduler_stats.kv_cache_usage)
            self._running, self._at_s = running, now_s

        def ignore(self, *args: Any, **kwargs: Any) -> None:
            return

        record_sleep_state = record_admission_rejection = log_engine_initialized = ignore

    return StepLogger


class VllmEngine:
    """Implements `InferenceEngine` with vLLM. `llm` is public for tests and benchmarks that time vLLM itself."""

    def __init__(self, llm: AsyncLLM, weights: WeightUpdateClient) -> None:
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        self.vocab_size = int(llm.model_config.get_vocab_size())
        self._inside: set[str] = set()
        self._overtaken: set[str] = set()
        """Requests that had no token when the weights were swapped, and must therefore restart."""
        self.weights, weights.before_swap = weights, self._overtake

    async def warm_up(self, recipe: Recipe) -> None:
        """Generate two tokens for each of H prompts, and score a prompt, so that vLLM compiles its functions now, which takes
        about 2.5 s. The prefix cache stays empty. Raises `EngineError` if the engine fails or its results are unusable."""
        sampling = vllm_sampling(SamplingParams(recipe.sampling.temperature, WARM_UP_TOKENS), None)
        prompt = np.zeros(1, np.int32)
        requests = [f"warm-up-{number}" for number in range(recipe.actor.sequences_in_progress)]
        outputs = await asyncio.gather(*(self._run(request_id, prompt, sampling) for request_id in requests))
        scored = await self.score(np.zeros(WARM_UP_TOKENS, np.int32))
        defects = {defect_of(completion_of(output.outputs[0])) for output in outputs} - {""}
        if defects or not np.isfinite(scored).all():
            raise EngineError(f"vLLM's first results cannot be used: {', '.join(sorted(defects)) or 'non-finite scores'}")

    async def generate(self, request: GenerationRequest) -> Completion:
        sampling = vllm_sampling(request.sampling, request.seed)
        name = request.request_id
        while True:
            self._inside.add(name)
            try:
                output = await self._run(name, request.prompt_token_ids, sampling, request.cache_salt())
                if name not in self._overtaken:
                    return completion_of(output.outputs[0])
            finally:
                self._inside.discard(name)
                self._overtaken.discard(name)
            async with self.weights.swapping:  # once the swap is over, the salt names the new version
                pass

    async def _overtake(self) -> None:
        """Before a swap, restart requests without a token, whose salt would let them read cached keys of the old weights."""
        begun = {name for name, tokens in self.progress().items() if tokens}
        self._overtaken |= self._inside - begun
        await self.llm.abort(list(self._overtaken))

    async def abort(self, request_ids: Sequence[str]) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        self._overtaken.difference_update(request_ids)
        try:
            await self.llm.abort(list(request_ids))
        except EngineDeadError as error:
            raise EngineError(f"vLLM's engine process died: {error}") from error

    def progress(self) -> Mapping[str, int]:
        """Return the number of tokens so far of each running request, by the request's id."""
        states = self.llm.output_processor.request_states.values()
        return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states if state.detokenizer}

    async def score(self, token_ids: TokenIds) -> Logprobs:
        from vllm import SamplingParams as VllmSamplingParams

        sampling = VllmSamplingParams(
            temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False, skip_reading_prefix_cache=True
        )
        output = await self._run(f"score-{os.urandom(6).hex()}", token_ids, sampling)
        positions = output.prompt_logprobs or []
        if len(positions) != len(token_ids):
            raise EngineError(f"vLLM scored {len(positions)} of {len(token_ids)} tokens")
        scored = [entry[int(token)].logprob for token, entry in zip(token_ids[1:], positions[1:], strict=True) if entry]
        return np.asarray(scored, dtype=np.float32)

    def decode(self, token_ids: Sequence[int] | TokenIds) -> str:
        how = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(np.asarray(token_ids).tolist(), **how))

    async def check_health(self) -> None:
        if self.llm.errored:
            raise EngineError(f"vLLM's engine process died: {self.llm.dead_error}")

    async def _run(
        self, request_id: str, prompt: TokenIds, sampling: VllmSamplingParams, cache_salt: str = ""
    ) -> RequestOutput:
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        final: RequestOutput | None = None
        try:
            # vLLM would send a prompt in any other form to a tokenizer thread.
            rendered = tokens_input(prompt.tolist(), cache_salt=cache_salt or None)
            async for output in self.llm.generate(rendered, sampling, request_id):
                final = output
        except (EngineDeadError, EngineGenerateError, ValueError) as error:
            raise EngineError(f"request {request_id}: {str(error) or error.__cause__}") from error
        if final is None or not final.finished:
            raise EngineError(f"request {request_id} ended without a result")
        return final


@lru_cache(maxsize=64)
def vllm_sampling(sampling: SamplingParams, seed: int | None) -> VllmSamplingParams:
    """Return vLLM's sampling parameters. Equal arguments share one cached object."""
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VllmSamplingParams(
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        stop_token_ids=list(sampling.stop_token_ids) or None,
        stop=list(sampling.stop) or None,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,  # a stop string may contain one
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # a shallow copy saves 20 µs; vLLM only adds the model's end tokens, which are always the same
    )


def completion_of(output: CompletionOutput) -> Completion:
    """Convert vLLM's output. Raises `EngineError` if its arrays differ in length or the sequence ended abnormally."""
    token_ids = np.asarray(output.token_ids, dtype=np.int32)
    flat: Any = output.logprobs  # vLLM lists the sampled token first at every position
    sampled = [flat.logprobs[start] for start in flat.start_indices] if flat is not None else []
    logprobs = np.asarray(sampled, dtype=np.float32)
    if len(logprobs) != len(token_ids):
        raise EngineError(f"vLLM returned {len(logprobs)} log-probabilities for {len(token_ids)} tokens")
    if output.finish_reason not in ("stop", "length", "abort"):
        raise EngineError(f"vLLM ended the sequence with the finish reason {output.finish_reason!r}")
    spans = tuple(
        VersionSpan(version.number, span.start, span.end, version.incarnation)
        for span in output.weight_versions or ()
        for version in (parse_version(span.version),)
    )
    finish_reason = None if output.finish_reason == "abort" else FinishReason(output.finish_reason)
    return Completion(token_ids, logprobs, spans, finish_reason)

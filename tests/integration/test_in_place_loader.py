"""Weights copied in place into vLLM's own model classes, compared with the same classes loaded afresh from a checkpoint.

On CPU vLLM packs each linear layer's weight and keeps only the packed form, which nothing can be copied into: that this is
refused is tested, and then packing is switched off, so that the model is as it is on a GPU. An engine with CUDA graphs is in
tests/gpu.
"""

import multiprocessing
from pathlib import Path
from unittest.mock import patch

import torch

from tests.support.parity import change_strongly, random_model

KINDS = {"llama": False, "qwen2": True, "mixtral": False, "qwen3_moe": True}
"""Kinds of models, and whether their embeddings are tied."""


def update_in_place(folder: Path) -> None:
    """Run in its own process, since vLLM's parallel state belongs to the process. One process imports vLLM for all kinds."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel

    torch.set_num_threads(1)
    torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    with set_current_vllm_config(config_of(folder / "mixtral" / "old")):  # only experts get a group of their own
        init_distributed_environment(1, 0, f"file://{folder / 'meeting'}", 0, "gloo")
        initialize_model_parallel(1, 1)
    for kind, tied in KINDS.items():
        check_kind(folder / kind / "old", folder / kind / "new", tied)


def config_of(folder: Path):
    from vllm.engine.arg_utils import EngineArgs

    size = {"skip_tokenizer_init": True, "max_model_len": 256}
    return EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, **size).create_engine_config()


def model_of(config):
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def check_kind(old: Path, new: Path, tied: bool) -> None:
    import vllm._custom_ops as ops
    from safetensors.torch import load_file
    from vllm.model_executor.layers import utils as layers

    from services.actor.weight_sync.loaders import choose

    cpu, config = torch.device("cpu"), config_of(old)
    packed = model_of(config)
    config.model_config.enforce_eager = False  # as with CUDA graphs
    loader, reason = choose(packed, config, cpu, False)
    assert loader.mode == "paused"
    assert "derives cpu_linear" in reason, reason

    with patch.object(ops, "_supports_onednn", False), patch.object(layers, "check_cpu_sgl_kernel", lambda *_: False):
        config.compilation_config.static_forward_context.clear()
        live = model_of(config)
        loader, reason = choose(live, config, cpu, False)
        assert loader.mode == "in_place", reason
        assert reason.startswith("CUDA graphs")
        config.model_config.enforce_eager = config.model_config.enable_sleep_mode = True
        assert choose(live, config, cpu, False)[0].mode == "in_place", "a swap would leave the memory that sleep frees"

        addresses = {name: parameter.data_ptr() for name, parameter in live.named_parameters()}
        for folder in (new, old, new):
            before = live.lm_head.weight.clone()
            loader.load(load_file(folder / "model.safetensors").items())
            assert torch.equal(live.lm_head.weight, before), "staged weights are not served"
            loader.swap()
            loader.drop()
        assert {name: parameter.data_ptr() for name, parameter in live.named_parameters()} == addresses
        fresh = dict(model_of(config_of(new)).named_parameters())

    updated = dict(live.named_parameters())
    assert updated.keys() == fresh.keys()
    for name, parameter in updated.items():
        assert parameter.numel() > 0, name
        assert torch.equal(parameter, fresh[name]), name
    assert (live.lm_head.weight is live.model.embed_tokens.weight) == tied


def test_models_updated_in_place_are_the_models_loaded_afresh(tmp_path: Path) -> None:
    for kind, tied in KINDS.items():
        model = random_model(kind, tied)
        model.save_pretrained(tmp_path / kind / "old")
        change_strongly(model, seed=1)
        model.save_pretrained(tmp_path / kind / "new")
    process = multiprocessing.get_context("spawn").Process(target=update_in_place, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0

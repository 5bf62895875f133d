"""In the actor image's build stage: inspects model classes, which takes vLLM 9 s in a process of its own before a cold start.

vLLM keeps the results in its cache folder, `modelinfos/*.json`, which a pod starts without; `services.actor.vllm_engine` copies
these there. Needs no GPU. A class that cannot be inspected during a build is left out, and is inspected when it is served.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "SmolLM3ForCausalLM",
)


def main() -> None:
    os.environ["VLLM_CACHE_ROOT"] = str(Path(sys.prefix, "share", "vllm"))
    from vllm import ModelRegistry

    for architecture in sys.argv[1:] or ARCHITECTURES:
        try:
            ModelRegistry.models[architecture].inspect_model_cls()
        except Exception as error:  # noqa: BLE001 - vLLM reports what failed in its process as it comes
            print(f"{architecture} is left out: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()

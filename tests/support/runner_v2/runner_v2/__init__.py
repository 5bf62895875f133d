"""With this folder's parent on PYTHONPATH, vLLM for CPUs can run its model runner V2, the one of GPUs, in Triton's interpreter.

Its two entry points are a Triton backend named `cpu`, which vLLM wants to see, and a plugin of vLLM (`make test-runner-v2`).
"""

from __future__ import annotations


def schedule_asynchronously() -> None:
    """Let vLLM schedule a step before it has the result of the previous one, as on a GPU. It forbids this on a CPU."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_allow(config):
        check(config)
        config.scheduler_config.async_scheduling = True

    if check.__name__ != check_and_allow.__name__:
        CpuPlatform.check_and_update_config = staticmethod(check_and_allow)

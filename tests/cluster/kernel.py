"""Whether this machine can run the mini cluster."""

from __future__ import annotations

import functools
import platform
import sys
import tempfile
from pathlib import Path

from tests.cluster import shim
from tests.faults import network


@functools.cache
def why_not_here() -> str:
    """Why pods cannot be run here; empty when they can."""
    if sys.platform != "linux":
        return "needs Linux"
    if platform.machine() not in shim.PIVOT_ROOT:
        return f"pivot_root of {platform.machine()} is not known"
    return network.why_not_here() or _why_no_container()


def _why_no_container() -> str:
    """Runs `true` in a container, which is the surest way to know."""
    import asyncio

    from tests.cluster.cluster import mini_cluster
    from tests.cluster.images import Image
    from tests.cluster.objects import ClusterError

    container = {"name": "probe", "image": "tool", "command": ["true"]}
    spec = {"restartPolicy": "Never", "enableServiceLinks": False, "containers": [container]}
    pod = {"kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}

    async def run_one() -> str:
        from tests.cluster.objects import Objects

        with tempfile.TemporaryDirectory() as folder:
            async with mini_cluster(Path(folder), Objects(), "default", {"tool": Image()}) as cluster:
                made = cluster.create(pod)
                assert made is not None
                try:
                    await cluster.until(lambda: made.finished, 20, "a container ends")
                except ClusterError as error:
                    return str(error)
                return "" if made.phase == "Succeeded" else made.logs()

    return asyncio.run(run_one())

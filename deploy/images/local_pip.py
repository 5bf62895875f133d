"""What pip's configuration on this machine says, for a build in a container: a pip.conf, and the folders that it names.

    local_pip.py FOLDER      writes FOLDER/pip.conf, prints buildah's `--volume` arguments for local folders

For machines whose packages come from local folders. Nothing of it stays in the image.
"""

from __future__ import annotations

import subprocess
import sys
from ast import literal_eval
from collections.abc import Iterator, Mapping
from pathlib import Path

CERTIFICATES = "/run/pip-certificates.crt"
"""Where the certificates are in the build: not where Debian's own lie, which a package installed there rewrites."""

KEYS = ("index-url", "extra-index-url", "find-links", "cert", "trusted-host", "timeout", "default-timeout")


def settings(listing: str) -> dict[str, str]:
    """`pip config list`'s lines, by key; the environment's win, as they do in pip."""
    found: dict[str, str] = {}
    for line in sorted(listing.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        found[name.rpartition(".")[2]] = str(literal_eval(value))
    return {key: found[key] for key in KEYS if key in found}


def config(found: Mapping[str, str]) -> str:
    places = dict(found) | ({"cert": CERTIFICATES} if "cert" in found else {})
    return "[global]\n" + "".join(f"{key} = {' '.join(value.split())}\n" for key, value in places.items())


def volumes(found: Mapping[str, str]) -> list[str]:
    """`FROM:TO:ro` of every local file and folder that is named."""
    return sorted({f"{path}:{CERTIFICATES if path == Path(found.get('cert', '')) else path}:ro" for path in _paths(found)})


def _paths(found: Mapping[str, str]) -> Iterator[Path]:
    for word in " ".join(found.values()).split():
        path = Path(word.removeprefix("file://"))
        if path.is_absolute() and path.exists():
            # An index beside its files: .../simple links to .../files
            yield path.parent if path.name == "simple" else path


def main(folder: Path) -> None:
    listing = subprocess.run([sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    found = settings(listing)
    (folder / "pip.conf").write_text(config(found))
    print(*(f"--volume {volume}" for volume in volumes(found)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Models in an object store: uploaded so that incomplete models are recognised, and fetched with checked digests.

Each folder that this project writes to a store has a `pipelinerl-manifest.json`. The manifest is first written to mark the
model as incomplete. Then the files are written, read back and compared. Finally the manifest is written again, with the size
and the SHA-256 of every file. The object `latest` beside the folders contains the name of the newest complete one. A folder
without a manifest comes from other tools and is not checked. Nothing is ever deleted. Stores are accessed through pyarrow,
which finds credentials where each store's own tools do.

    python -m services.trainer.checkpoint.store FOLDER URL    # uploads the model in FOLDER to URL, as a separate process

Other modules decide when to upload, and how often.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from pipelinerl.errors import FieldError, PipelineRLError, ServiceError, first_line
from pipelinerl.initial_model import COMPLETE
from pipelinerl.run_dir import CHECKPOINTS, RUN_STATE, resumable
from pipelinerl.service.logs import without_secrets
from services.trainer.checkpoint.files import link_tree

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

MANIFEST, LATEST = "pipelinerl-manifest.json", "latest"
_FORMAT = 1
_CHUNK_BYTES = 8 * 1024**2

Digest: TypeAlias = tuple[int, str]
"""Number of bytes, and hexadecimal SHA-256."""


def put_model(folder: Path, url: str) -> int:
    """Upload all files of `folder` to the folder `url`, verify them, point `latest` at it, and return the number of bytes. A
    model already at `url` counts as incomplete from the start. Raises `ServiceError`, and the store's `OSError`."""
    store, root = _open(url)
    _write(store, f"{root}/{MANIFEST}", {"format": _FORMAT, "files": None})
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files: dict[str, Digest] = {}
    for name in names:
        with (folder / name).open("rb") as source, _output(store, f"{root}/{name}") as target:
            files[name] = _copy(source, target)
    for name, sent in files.items():
        with store.open_input_stream(f"{root}/{name}") as stored:
            if (found := _copy(stored)) != sent:
                raise ServiceError(f"{url}/{name} differs from the sent file: {found[0]} bytes, sent {sent[0]}")
    _write(store, f"{root}/{MANIFEST}", {"format": _FORMAT, "files": files})
    parent, _, name = root.rpartition("/")
    with _output(store, f"{parent}/{LATEST}") as target:
        target.write(name.encode())
    return sum(size for size, _ in files.values())


def fetch_model(url: str, folder: Path) -> str:
    """Fill the empty `folder` with the model at `url`, which may end in `latest`. Return the URL of its actual folder.

    Raises `FieldError` if the model is missing or incomplete, `ServiceError` if it arrives damaged or is being replaced, and
    the store's `OSError`.
    """
    store, root = _open(url)
    parent, _, name = root.rpartition("/")
    try:
        if name == LATEST:
            with store.open_input_stream(root) as stream:
                name = stream.read(256).decode(errors="replace")
            root, url = f"{parent}/{_safe(name, url)}", f"{url.rpartition('/')[0]}/{name}"
        files = _listed(store, root, url)
        for name, said in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with store.open_input_stream(f"{root}/{name}") as source, (folder / name).open("xb") as target:
                found = _copy(source, target)
            if said is not None and found != said:
                raise ServiceError(f"{url}/{name} does not match {MANIFEST}: damaged, or being replaced; start again")
    except FileNotFoundError as error:
        raise FieldError("model.name", url, f"there is no model: {first_line(error)}") from error
    return url


def fetch_initial(name: str, run_dir: Path, folder: Path) -> str:
    """Fill the empty `folder` with the model `name` (from `model.name`), and return its source. Raises like `fetch_model`.

    `name`: a URL, or a folder relative to `run_dir`'s parent, or else to the current folder. A run's `checkpoints/latest` means
    its newest checkpoint.
    """
    if "://" in name:
        found = fetch_model(name, folder)
    else:
        source = next((one for root in (run_dir.parent, Path()) if (one := _newest(root / name)).is_dir()), None)
        if source is None:
            raise FieldError("model.name", name, f"there is no such folder, neither in {run_dir.parent.resolve()} nor here")
        try:
            link_tree(source, folder, without=RUN_STATE.parent.name)
        except OSError as error:
            raise ServiceError(f"{source} cannot be copied, or was removed meanwhile: {first_line(error)}") from error
        found = str(source)
    if not (folder / COMPLETE).is_file():
        raise FieldError("model.name", name, f"has no {COMPLETE}: not a Hugging Face model folder")
    return found


def _newest(folder: Path) -> Path:
    """Return the newest checkpoint if `folder` is a run's `checkpoints/latest`, and any other folder unchanged."""
    found = resumable(folder.parent.parent) if (folder.parent.name, folder.name) == (CHECKPOINTS, LATEST) else {}
    return found[max(found)].parent.parent if found else folder


def _listed(store: FileSystem, root: str, url: str) -> dict[str, Digest | None]:
    """Return the names of a model's files, relative to its folder, with their digests if there is a manifest."""
    from pyarrow.fs import FileSelector, FileType

    if store.get_file_info(f"{root}/{MANIFEST}").type == FileType.NotFound:
        found = store.get_file_info(FileSelector(root, recursive=True))
        names = [PurePosixPath(info.path).relative_to(root).as_posix() for info in found if info.type == FileType.File]
        return {_safe(name, url): None for name in names}
    with store.open_input_stream(f"{root}/{MANIFEST}") as stream:
        text = stream.read()
    try:
        manifest = json.loads(text)
        if manifest["format"] != _FORMAT or manifest["files"] is None:
            raise ValueError("its upload has not ended")
        return {_safe(name, url): (int(size), str(sha256)) for name, (size, sha256) in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        fix = f"is not whole by its {MANIFEST} ({error}): wait for the upload, or take another checkpoint"
        raise FieldError("model.name", url, fix) from error


def _safe(name: str, url: str) -> str:
    """Return the name if it is a relative path inside its folder. Raises `FieldError` otherwise."""
    if not name or name.startswith("/") or ".." in PurePosixPath(name).parts or "\0" in name:
        raise FieldError("model.name", url, f"names a file {name!r}: it is not a model of this project")
    return name


def _open(url: str) -> tuple[FileSystem, str]:
    from pyarrow.fs import FileSystem

    try:
        store, root = FileSystem.from_uri(url)
    except (ValueError, ImportError) as error:
        raise FieldError("the URL of a model", url, first_line(error)) from error
    return store, root.rstrip("/")


def _output(store: FileSystem, path: str) -> IO[bytes]:
    if store.type_name == "local":  # object stores have no folders to make
        store.create_dir(path.rpartition("/")[0], recursive=True)
    stream: IO[bytes] = store.open_output_stream(path)
    return stream


def _write(store: FileSystem, path: str, content: dict[str, Any]) -> None:
    with _output(store, path) as target:
        target.write(json.dumps(content).encode() + b"\n")


def _copy(source: IO[bytes], target: IO[bytes] | None = None) -> Digest:
    """Read `source`, copy it to `target` if given, and return the digest of the data."""
    size, sha256 = 0, hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        sha256.update(chunk)
        size += len(chunk)
        if target is not None:
            target.write(chunk)
    return size, sha256.hexdigest()


def main() -> int:
    folder, url = sys.argv[1:]
    try:
        put_model(Path(folder), url)
    except (PipelineRLError, OSError) as error:  # of others the traceback's last line says as much
        print(without_secrets(first_line(error), os.environ), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

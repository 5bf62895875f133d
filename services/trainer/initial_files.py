"""The files of the initial policy that a run built, in chunks for actors that share no disk with the trainer.

Serves one folder under one name, and nothing that a caller could point elsewhere. Where the policy is a hub model or a
folder of the user's, actors have that themselves, and are told so.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from pipelinerl.config.recipe import Recipe
from pipelinerl.errors import ServiceError
from pipelinerl.initial_model import CHUNK_BYTES, COMPLETE, MOST_FILES, built_name, is_built
from pipelinerl.v1 import trainer_pb2


@dataclass(frozen=True)
class InitialFiles:
    """`folder` None: the run built no model, for the reason `why_not`."""

    name: str
    folder: Path | None
    why_not: str = ""

    async def chunks(self, asked: str) -> AsyncIterator[trainer_pb2.InitialModelChunk]:
        """All files, `config.json` last, a chunk in memory at a time. Raises `ServiceError` for another model than `asked`."""
        if self.folder is None:
            raise ServiceError(self.why_not)
        if asked != self.name:
            raise ServiceError(f"this trainer's initial model is {self.name}, not {asked!r}: its recipe is another one")
        files = model_files(self.folder)
        for path in files:
            async for chunk in _file_chunks(path, len(files)):
                yield chunk


def initial_files(recipe: Recipe, source: str) -> InitialFiles:
    """`source`: where this trainer loaded the initial policy from."""
    if is_built(recipe.model):
        return InitialFiles(built_name(recipe), Path(source))
    kind = {"hub": "a hub model", "path": "a folder"}[recipe.model.source]
    return InitialFiles(
        "", None, f"the initial model of this run is {kind}, {recipe.model.name}: it is not sent to actors"
    )


def model_files(folder: Path) -> list[Path]:
    """Those to send. Raises `ServiceError` where there are more than a model has."""
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    if len(files) > MOST_FILES:
        raise ServiceError(f"{folder} holds {len(files)} files, more than the {MOST_FILES} of a model")
    return sorted(files, key=lambda path: path.name == COMPLETE)


async def _file_chunks(path: Path, num_files: int) -> AsyncIterator[trainer_pb2.InitialModelChunk]:
    """At least one, also of an empty file."""
    with path.open("rb") as file:
        digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
        size, sent = file.tell(), 0
        file.seek(0)
        while sent < size or size == 0:
            data = await asyncio.to_thread(file.read, CHUNK_BYTES)
            sent += len(data)
            yield trainer_pb2.InitialModelChunk(
                file=path.name, size_bytes=size, sha256=digest.digest(), data=data, files=num_files
            )
            if not data:
                return

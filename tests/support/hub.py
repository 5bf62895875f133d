"""A stand-in for the Hugging Face hub on loopback: one data set behind the few routes that the real client calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tests.support.http_server import Answer, Request, http_server

COMMIT = "a" * 40


@contextmanager
def hub_with(name: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve `files` as the data set `name`. Yields the endpoint, and the paths that were asked for, with their credentials."""
    asked: list[str] = []
    api, resolve = f"/api/datasets/{name}", f"/datasets/{name}/resolve/"

    def answer(request: Request) -> Answer:
        path = urlsplit(request.path).path
        asked.append(f"{path} {request.headers.get('Authorization', '')}")
        if path.startswith(f"{api}/tree/"):
            return Answer(json.dumps(entries(path.removeprefix(f"{api}/tree/").partition("/")[2])).encode())
        if path == api or path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            listed = [{"rfilename": file} for file in files]
            return Answer(json.dumps({"id": name, "sha": COMMIT, "siblings": listed, "private": False}).encode())
        if path.startswith(resolve) and (file := path.removeprefix(resolve).partition("/")[2]) in files:
            return Answer(files[file], headers={"ETag": f'"{hash(files[file])}"', "X-Repo-Commit": COMMIT})
        entry = "EntryNotFound" if path.startswith(resolve) else "RepoNotFound"
        code = "RevisionNotFound" if path.startswith(api) else entry
        return Answer(status=404, headers={"X-Error-Code": code})

    def entries(folder: str) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        names = {file.removeprefix(prefix).partition("/")[0] for file in files if file.startswith(prefix)}
        kinds = {path: {"type": "file", "size": len(files[path])} if path in files else {"type": "directory"}
                 for path in (f"{prefix}{one}" for one in sorted(names))}  # fmt: skip
        return [{"path": path, "oid": "b" * 40, **kind} for path, kind in kinds.items()]

    with http_server(answer) as url:
        yield url, asked

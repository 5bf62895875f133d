"""A stand-in for the Hugging Face hub on loopback: one data set behind the few routes that the real client calls."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

COMMIT = "a" * 40


@contextmanager
def hub_with(name: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve `files` as the data set `name`. Yields the endpoint, and the paths that were asked for, with their credentials."""
    asked: list[str] = []
    api, resolve = f"/api/datasets/{name}", f"/datasets/{name}/resolve/"

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            asked.append(f"{path} {self.headers.get('Authorization', '')}")
            if path.startswith(f"{api}/tree/"):
                self._answer(json.dumps(entries(path.removeprefix(f"{api}/tree/").partition("/")[2])).encode())
            elif path == api or path in (f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                listed = [{"rfilename": file} for file in files]
                self._answer(json.dumps({"id": name, "sha": COMMIT, "siblings": listed, "private": False}).encode())
            elif path.startswith(resolve) and (file := path.removeprefix(resolve).partition("/")[2]) in files:
                self._answer(files[file], ETag=f'"{hash(files[file])}"', **{"X-Repo-Commit": COMMIT})
            else:
                code = (
                    "RevisionNotFound"
                    if path.startswith(api)
                    else "EntryNotFound"
                    if path.startswith(resolve)
                    else "RepoNotFound"
                )
                self._answer(b"", status=404, **{"X-Error-Code": code})

        do_HEAD = do_GET

        def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return

    def entries(folder: str) -> list[dict[str, Any]]:
        prefix = f"{folder}/" if folder else ""
        names = {file.removeprefix(prefix).partition("/")[0] for file in files if file.startswith(prefix)}
        paths = [f"{prefix}{one}" for one in sorted(names)]
        return [
            {"type": "file", "path": path, "size": len(files[path]), "oid": "b" * 40}
            if path in files
            else {"type": "directory", "path": path, "oid": "c" * 40}
            for path in paths
        ]

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

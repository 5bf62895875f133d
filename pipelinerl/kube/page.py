"""Serve a release's page at one address: the trainer's page while it runs, and then its report.

    python -m pipelinerl.kube.page --trainer HOST:PORT --report FILE --names runs.example.com

The server passes on only requests for the page, so visitors can reach nothing else of the trainer. It holds no credentials and
mounts no volume of the run. Neither this server nor the trainer's page authenticates visitors. The Ingress must do that.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import http.client
import logging
from contextlib import closing
from pathlib import Path

from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry

from pipelinerl.service.http import health_app, serve_http
from pipelinerl.service.lifecycle import Readiness, exit_code, leave, stop_event

log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 10.0
_OF_A_CONNECTION = {"connection", "content-length", "date", "keep-alive", "server", "transfer-encoding"}
_REPORT_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""HTTP headers of the report, which is a single file that contains its scripts."""
AWAY = "The trainer does not answer, and there is no report yet: try again in a minute.\n"


def page_app(trainer: str, report: Path) -> FastAPI:
    """Build the HTTP app. `trainer`: host:port of the trainer's HTTP server. `report`: a gzip file that may appear later."""
    app = health_app(Readiness(""), CollectorRegistry())

    @app.get("/")
    @app.get("/page/{part:path}")
    def page(request: Request) -> Response:
        try:
            with closing(http.client.HTTPConnection(trainer, timeout=ANSWER_WITHIN_S)) as connection:
                connection.request("GET", request.url.path + (f"?{request.url.query}" if request.url.query else ""))
                found = connection.getresponse()
                headers = {name: value for name, value in found.getheaders() if name.lower() not in _OF_A_CONNECTION}
                return Response(found.read(), found.status, headers)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            log.debug("%s does not answer: %s", trainer, error)
        if request.url.path == "/" and report.is_file():
            return Response(gzip.decompress(report.read_bytes()), media_type="text/html", headers=_REPORT_HEADERS)
        return Response(AWAY, 503, media_type="text/plain", headers={"Cache-Control": "no-store"})

    return app


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.kube.page", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--host", default="0.0.0.0", help="interface to listen on")
    parser.add_argument("--trainer", required=True, metavar="HOST:PORT", help="the trainer's HTTP server")
    parser.add_argument("--report", required=True, type=Path, metavar="FILE", help="report.html.gz; the file may appear later")
    parser.add_argument("--names", default="localhost", help="host names by which browsers open the page, separated by commas")
    args = parser.parse_args()

    async def serve() -> None:
        app = page_app(args.trainer, args.report)
        with stop_event() as stop:
            async with serve_http(app, args.host, 8080, names=args.names.split(",")):
                await stop.wait()

    return exit_code(lambda: asyncio.run(serve()))


if __name__ == "__main__":
    leave(main())

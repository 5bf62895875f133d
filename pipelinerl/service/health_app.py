"""The HTTP application that every service answers with: /healthz, /readyz, /metrics.

A service adds its own routes to the returned application (the trainer's run page). It holds no state of its own.
"""

from __future__ import annotations

from fastapi import FastAPI, Response
from prometheus_client import CollectorRegistry

from pipelinerl.service.exposition import CONTENT_TYPE, Exposition
from pipelinerl.service.loop_watch import LoopWatch
from pipelinerl.service.readiness import Readiness

BLOCKED_AFTER_S = 30.0


def health_app(
    readiness: Readiness,
    registry: CollectorRegistry,
    *,
    loop_watch: LoopWatch | None = None,
    blocked_after_s: float = BLOCKED_AFTER_S,
) -> FastAPI:
    """`/healthz`: 503 when the watched loop has not run for `blocked_after_s`, else 200. `/readyz`: 503 with the reason
    until ready. `/metrics`: the registry, in the text format that every scraper takes.

    `loop_watch` makes sense only where the application is served from a thread of its own.
    """
    exposition = Exposition(registry)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> Response:
        silent_s = loop_watch.silent_s() if loop_watch else 0.0
        if silent_s > blocked_after_s:
            return Response(f"event loop blocked for {silent_s:.1f} s\n", 503, media_type="text/plain")
        return Response("ok\n", media_type="text/plain")

    @app.get("/readyz")
    async def readyz() -> Response:
        reason = readiness.reason
        return Response(f"{reason or 'ready'}\n", 503 if reason else 200, media_type="text/plain")

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(exposition.text(), headers={"Content-Type": CONTENT_TYPE})

    return app

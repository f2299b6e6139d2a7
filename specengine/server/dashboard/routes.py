"""The routes of the dashboard."""

from __future__ import annotations

from importlib.resources import files

import orjson
from fastapi import FastAPI
from starlette.responses import Response

from specengine.server.dashboard.snapshot import snapshot
from specengine.server.middleware import PAGES
from specengine.server.service import Service

_FILES = {
    "": ("index.html", "text/html"),
    "/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard.js": ("dashboard.js", "text/javascript"),
    "/charts.js": ("charts.js", "text/javascript"),
    "/uPlot.js": ("uPlot.iife.min.js", "text/javascript"),
    "/uPlot.css": ("uPlot.min.css", "text/css"),
    "/uPlot.LICENSE": ("uPlot.LICENSE", "text/plain"),
}
_HEADERS = {
    "Cache-Control": "no-cache",
    # uPlot sets styles of its elements, which style-src does not cover.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def add_dashboard(app: FastAPI, service: Service) -> None:
    for path, (name, media_type) in _FILES.items():
        _add_file(app, PAGES + path, name, media_type)

    @app.get(PAGES + "/data", include_in_schema=False)
    async def data() -> Response:
        found = snapshot((await service.render_metrics()).decode())
        headers = {"Cache-Control": "no-store"}
        return Response(orjson.dumps(found), headers=headers, media_type="application/json")


def _add_file(app: FastAPI, path: str, name: str, media_type: str) -> None:
    content = (files("specengine.server.dashboard") / "static" / name).read_bytes()

    @app.get(path, include_in_schema=False)
    async def file() -> Response:
        return Response(content, headers=_HEADERS, media_type=media_type)

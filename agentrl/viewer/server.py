"""The page over HTTP, for this machine only.

It listens on 127.0.0.1, answers requests whose Host says so (a page of another site that resolves its own name to this
machine gets nothing), and only reads. Requests name sources, processes, rollouts and images by number and digest; no
part of a request becomes a path.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.errors import ConfigurationError
from agentrl.viewer.page import FILES, TYPES, read_file
from agentrl.viewer.shown import Shown

HOST = "127.0.0.1"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def make_app(shown: Shown) -> Starlette:
    """The application that serves the page and its data."""

    def data(give: Callable[[Request], Any]) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            value = give(request)
            return PlainTextResponse("not found", 404) if value is None else _json(value)

        return answer

    def rollouts(request: Request) -> Any:
        source, version = request.path_params["source"], request.query_params.get("version", "0")
        if source >= len(shown.indexes) or not version.isdecimal():
            return None
        return shown.indexes[source].changes(request.query_params.get("epoch", ""), int(version))

    def logs(request: Request) -> Any:
        source = request.path_params["source"]
        return shown.indexes[source].logs() if source < len(shown.indexes) else None

    def search(request: Request) -> Any:
        source, text = request.path_params["source"], request.query_params.get("text", "")
        return shown.indexes[source].search(text) if source < len(shown.indexes) and text else None

    def rollout(request: Request) -> Any:
        return shown.rollout(**request.path_params, full="full" in request.query_params)

    def image(request: Request) -> Response:
        png = shown.image(**request.path_params)
        return PlainTextResponse("not found", 404) if png is None else Response(png, media_type="image/png")

    def file(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in FILES:
            return PlainTextResponse("not found", 404)
        return Response(read_file(name), media_type=TYPES[name.rpartition(".")[2]])

    one = "{source:int}/{rank:int}/{number:int}"
    routes = [
        Route("/", file),
        Route("/favicon.ico", lambda request: Response(status_code=204)),
        Route("/static/{name}", file),
        Route("/api/runs", data(lambda request: shown.runs())),
        Route("/api/rollouts/{source:int}", data(rollouts)),
        Route("/api/logs/{source:int}", data(logs)),
        Route("/api/search/{source:int}", data(search)),
        Route(f"/api/rollout/{one}", data(rollout)),
        Route(f"/api/tokens/{one}", data(lambda request: shown.tokens(**request.path_params))),
        Route("/api/image/{source:int}/{digest}", image),
    ]
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"], www_redirect=False)
    return Starlette(routes=routes, middleware=[Middleware(_Headers), hosts])


def listen(port: int) -> socket.socket:
    """A socket on this machine's loopback address.

    Args:
        port: The port; 0 takes one that is free.

    Raises:
        ConfigurationError: The port is taken.
    """
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except OSError as error:
        listening.close()
        raise ConfigurationError(f"port {port}: {error.strerror}; choose another one with --port") from error
    return listening


def serve(shown: Shown, listening: socket.socket) -> None:
    """Serve until the process is interrupted."""
    uvicorn.Server(uvicorn.Config(make_app(shown), log_level="warning")).run(sockets=[listening])


def _json(value: Any) -> Response:
    # In ASCII: lone surrogates, which a model can write, have no other form. NaN is a mistake here.
    return Response(json.dumps(value, allow_nan=False, separators=(",", ":")), media_type="application/json")


class _Headers:
    """Gives every answer the headers above."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers)

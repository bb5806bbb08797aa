"""The HTTP side: one server for all programs of an engine, which tells them apart by their base URL.

Starlette on uvicorn, on the engine's own event loop: parsing HTTP and noticing disconnects is theirs, and a request
awaits the generator without a hop between threads. It listens on the loopback interface unless told otherwise, and
each rollout has a path with 192 random bits, so a program can neither guess another one's rows nor be guessed at.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from contextlib import suppress
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from agentrl.rollout.endpoint.caller import Caller
from agentrl.rollout.endpoint.wire import ApiError, read_request

CLOSE_SECONDS = 5.0
"""How long the server may take to end."""


class Endpoint:
    """Serves callers on the running event loop.

    Args:
        host: The interface to listen on.
        port: The port, 0 for any free one.
        url: How programs reach it, where that is not `http://host:port` (from a container, say).
        accept_sampling: See `agentrl.rollout.endpoint.wire`.
    """

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, url: str | None = None, accept_sampling: bool = False
    ) -> None:
        self._host, self._port, self._url = host, port, url
        self._accept_sampling = accept_sampling
        self._callers: dict[str, Caller] = {}
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen; does nothing when it does already."""
        if self._serving is not None:
            return
        bound = socket.create_server((self._host, self._port))
        port = bound.getsockname()[1]
        self._address = self._url or f"http://{self._host}:{port}"
        routes = [
            Route("/r/{token}/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/r/{token}/v1/models", self._models),
        ]
        app = Starlette(routes=routes, exception_handlers={ApiError: _refuse})
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        while not self._server.started:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.005)

    def open(self, caller: Caller) -> tuple[str, str]:
        """Let a program in; gives back its base URL and its API key."""
        token = secrets.token_urlsafe(24)
        self._callers[token] = caller
        return f"{self._address}/r/{token}/v1", token

    async def shut(self, key: str) -> None:
        """Let a program in no longer, and end its requests."""
        if (caller := self._callers.pop(key, None)) is not None:
            await caller.close()

    async def close(self) -> None:
        """Stop listening."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        serving, self._serving = self._serving, None
        with suppress(TimeoutError):
            await asyncio.wait_for(serving, CLOSE_SECONDS)

    def _caller(self, request: Request) -> Caller:
        if (caller := self._callers.get(request.path_params["token"])) is None:
            raise ApiError("No rollout has this base URL, or it is over.", status=404, code="rollout_over")
        return caller

    async def _models(self, request: Request) -> Response:
        self._caller(request)
        model = {"id": "policy", "object": "model", "created": 0, "owned_by": "agentrl"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _chat(self, request: Request) -> Response:
        caller = self._caller(request)
        try:
            body: Any = await request.json()
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ApiError(f"The body is no JSON: {error}") from None
        chat = read_request(body, caller.stage.sampling, accept_sampling=self._accept_sampling)
        answering, leaving = caller.start(chat), asyncio.create_task(_disconnected(request))
        try:
            await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            answering.cancel()  # does nothing to one that is done
        try:
            completion = await answering
        except asyncio.CancelledError:
            raise ApiError("The request was given up.", status=499) from None
        headers = {"x-agentrl-ignored": ", ".join(chat.ignored)} if chat.ignored else None
        if chat.stream:
            return StreamingResponse(completion.events(), media_type="text/event-stream", headers=headers)
        return JSONResponse(completion.body(), headers=headers)


async def _disconnected(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    # OpenAI's clients try most errors of the server again; those of a rollout that is over are final.
    return JSONResponse(error.body(), error.status, headers={"x-should-retry": "false"})

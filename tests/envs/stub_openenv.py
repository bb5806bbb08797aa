"""An OpenEnv server that lies when it is told to: `reset` with `trouble="..."` chooses how, in the first step after it.

It has the action model of the world "trouble" of the real servers; every honest step is rewarded with 1.
"""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from socket import SHUT_RDWR
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response
from websockets.sync.server import Server, ServerConnection, serve

ACTION = {
    "title": "Trouble",
    "type": "object",
    "properties": {"what": {"type": "string"}, "amount": {"type": "number"}, "metadata": {"type": "object"}},
    "required": ["what"],
}


def observation(**changes: Any) -> str:
    """The answer to a step."""
    return json.dumps(
        {"type": "observation", "data": {"observation": {"text": "."}, "reward": 1.0, "done": False, **changes}}
    )


def error(code: str, **more: Any) -> str:
    return json.dumps({"type": "error", "data": {"message": "so it is", "code": code, **more}})


def _cut(socket: ServerConnection) -> None:
    socket.socket.shutdown(SHUT_RDWR)  # without a closing frame


def _half_a_message(socket: ServerConnection) -> None:
    socket.socket.sendall(b"\x81\x7e\x01\x00" + b'{"type":"observation"')  # 256 bytes are announced
    _cut(socket)


def _send_at_once(socket: ServerConnection, *texts: str) -> None:
    """Send several messages in one piece: the client has the last one as soon as it has the first."""
    with socket.protocol_mutex:
        for text in texts:
            socket.protocol.send_text(text.encode())
        socket.socket.sendall(b"".join(socket.protocol.data_to_send()))


def _twice(socket: ServerConnection) -> None:
    _send_at_once(socket, observation(), observation(reward=5.0))


def _twice_but_late(socket: ServerConnection) -> None:
    socket.send(observation())
    time.sleep(0.05)
    socket.send(observation(reward=5.0))


def _says_goodbye(socket: ServerConnection) -> None:
    socket.send(error("SESSION_ERROR"))
    socket.close()


LIES: dict[str, str | bytes | Callable[[ServerConnection], Any]] = {
    "empty": "{}",
    "no data": '{"type":"observation"}',
    "null": '{"type":"observation","data":null}',
    "no reward": '{"type":"observation","data":{"observation":{},"done":false}}',
    "other type": '{"type":"state","data":{"episode_id":null,"step_count":0}}',
    "unknown type": '{"type":"greeting","data":{}}',
    "text reward": observation(reward="abc"),
    "text done": observation(done="false"),
    "number done": observation(done=0),
    "list": observation(observation=[1, 2]),
    "nan": observation(reward=float("nan")),
    "infinite": observation().replace("1.0", "1e999"),
    "huge": observation(reward=10**400),
    "array": "[1, 2]",
    "no json": "<html>502 Bad Gateway</html>",
    "deep": "[" * 100_000,
    "two rewards": observation().replace('"reward"', '"reward": 0.0, "reward"'),
    "binary": observation().encode(),
    "unknown error": error("OUT_OF_LUCK"),
    "picture": observation(observation={"screen": "data:image/png;base64,AAAA"}),
    "bad arguments": error("VALIDATION_ERROR", errors=[{"loc": ["amount"], "msg": "Input should be a number"}]),
    "goodbye": _says_goodbye,
    "twice": _twice,
    "twice but late": _twice_but_late,
    "one too many": observation(),  # and another one with whatever is asked next
    "half": _half_a_message,
    "cut": _cut,
    "closed": lambda socket: socket.close(),
    "hangs": lambda socket: list(socket),  # until the client leaves
}


class StubServer:
    """Holds the sessions of the stub.

    Attributes:
        sessions: How many are open.
        opened: How many there were.
        calls: How many JSON-RPC calls there were.
        headers: What `Authorization` each path was asked with last.
        redirect: Where it sends whoever wants a session.

    Args:
        mood: Chooses how an episode goes wrong, whatever `reset` asks for; "" for not at all.
        tls: For `https://`.
    """

    def __init__(self, mood: Callable[[], str] | None = None, tls: ssl.SSLContext | None = None) -> None:
        self._mood = mood
        self.sessions = 0
        self.opened = 0
        self.calls = 0
        self.headers: dict[str, str] = {}
        self.redirect: str | None = None
        self._lock = threading.Lock()
        self.server: Server = serve(self._play, "127.0.0.1", 0, process_request=self._http, ssl=tls)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.server.socket.getsockname()[1]}"

    def _http(self, socket: ServerConnection, request: Request) -> Response | None:
        self.headers[request.path] = request.headers.get("Authorization", "")
        if self.redirect is not None:
            response = socket.respond(302, "")
            response.headers["Location"] = self.redirect
            return response
        if request.path == "/schema":
            return socket.respond(200, json.dumps({"action": ACTION}))
        return None if request.path == "/ws" else socket.respond(404, "")

    def _play(self, socket: ServerConnection) -> None:
        with self._lock:
            self.sessions += 1
            self.opened += 1
        try:
            with suppress(ConnectionClosed, OSError):
                self._answer(socket)
        finally:
            with self._lock:
                self.sessions -= 1

    def _answer(self, socket: ServerConnection) -> None:
        trouble, extra = "", ""
        for frame in socket:
            message = json.loads(frame)
            before = [extra] if extra else []
            extra = ""
            if message["type"] == "mcp":
                self.calls += 1
                answer = {"jsonrpc": "2.0", "id": message["data"]["id"], "error": {"code": -32601, "message": "?"}}
                _send_at_once(socket, *before, json.dumps({"type": "mcp", "data": answer}))
            elif message["type"] == "reset":
                trouble = message["data"].get("trouble", "") if self._mood is None else self._mood()
                socket.send(observation(reward=None))
            else:
                lie = LIES.get(trouble, observation())
                extra = observation(reward=5.0) if trouble == "one too many" else ""
                if callable(lie):
                    lie(socket)
                elif isinstance(lie, bytes):
                    socket.send(lie)
                else:
                    _send_at_once(socket, *before, lie)
                trouble = ""


@contextmanager
def stub_server(mood: Callable[[], str] | None = None, tls: ssl.SSLContext | None = None) -> Iterator[StubServer]:
    """Serve, in a thread."""
    stub = StubServer(mood, tls)
    thread = threading.Thread(target=stub.server.serve_forever)
    thread.start()
    try:
        yield stub
    finally:
        stub.server.shutdown()
        thread.join()

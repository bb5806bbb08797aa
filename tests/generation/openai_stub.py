"""A server that speaks OpenAI's protocol as far as tests ask it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def says(content: str | None = None, *calls: tuple[str, str], tokens: int = 5, finish: str | None = None) -> Any:
    """An answer of the server, as vLLM 0.32 writes it; calls are given as name and written arguments."""
    written = [
        {"id": f"call_{k}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for k, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "refusal": None, "annotations": None, "audio": None}
    message |= {"function_call": None, "tool_calls": written, "reasoning": "Hm."}
    finish = finish or ("tool_calls" if calls else "stop")
    usage = {"prompt_tokens": 23, "total_tokens": 23 + tokens, "completion_tokens": tokens}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}


FULL = {
    "message": "This model's maximum context length is 512 tokens. However, your prompt contains at least 513 input "
    "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
    "(parameter=input_tokens, value=513)",
    "type": "BadRequestError",
    "param": "input_tokens",
    "code": 400,
}
"""How vLLM 0.32 refuses a conversation that is too long, with status 400."""


class Server(ThreadingHTTPServer):
    """Answers with what it was given, one after the other: an answer, a status, or an error with status 400; or by a
    policy of requests.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[Any] = []
        self.bodies: list[Any] = []
        self.models: list[Any] = [{"id": "clever"}, {"id": "other"}]
        self.policy: Callable[[Any], Any] = lambda body: self.answers.pop(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._send(200, {"data": self.server.models})

    def do_POST(self) -> None:
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answer = self.server.policy(self.server.bodies[-1])
        if isinstance(answer, int):
            self._send(answer, {"error": "no"})
        else:
            self._send(400 if "error" in answer else 200, answer)

    def _send(self, status: int, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def serving() -> Iterator[Server]:
    """A server while it is needed."""
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()

"""A stand-in for the hub on this machine: it takes what the real client sends and remembers the files."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from huggingface_hub import constants
from transformers.utils import hub as transformers_hub


@dataclass
class Hub:
    """What was sent.

    Attributes:
        url: Where it listens.
        private: Repositories ("models/me/name"), and whether each was made private.
        files: Files by repository and path.
        commits: Repository and message of each commit, in order.
        tokens: Tokens that came with requests.
        broken: Whether commits are answered with an error.
    """

    url: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    commits: list[tuple[str, str]] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    broken: bool = False


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a hub; the real client talks to it, as with `HF_ENDPOINT`, which it reads when it is imported."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("Authorization", ""))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            parts = self.path.split("?")[0].strip("/").split("/")  # api KIND OWNER NAME VERB REVISION
            if parts[1:] == ["repos", "create"]:
                self._create(json.loads(body))
            elif parts[1:] == ["validate-yaml"]:
                self._answer({"errors": [], "warnings": []})
            elif parts[4] == "preupload":
                paths = [file["path"] for file in json.loads(body)["files"]]
                self._answer({"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]})
            else:
                assert parts[4] == "commit", self.path
                self._commit("/".join(parts[1:4]), body)

        def _create(self, asked: dict[str, Any]) -> None:
            kind = f"{asked.get('type') or 'model'}s"
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            hub.private[f"{kind}/{name}"] = asked.get("private") is True or asked.get("visibility") == "private"
            hub.files.setdefault(f"{kind}/{name}", {})
            self._answer({"url": f"{hub.url}/{name if kind == 'models' else f'{kind}/{name}'}"})

        def _commit(self, repo: str, body: bytes) -> None:
            if hub.broken:
                self._answer({"error": "no room"}, status=400)
                return
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "header":
                    hub.commits.append((repo, entry["value"]["summary"]))
                else:
                    assert entry["key"] == "file", entry["key"]
                    hub.files[repo][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self._answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{hub.url}/{repo}/commit/{'0' * 40}"})

        def _answer(self, value: Any, status: int = 200) -> None:
            text = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(transformers_hub, "_hf_api", None)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

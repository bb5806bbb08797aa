"""One vLLM server over HTTP: blocking calls that manage it, and turns that are awaited.

Every call has a time limit, and every error says which server, which route, and what the server said.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any
from urllib.parse import urlsplit

import httpx

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.vllm_protocol import shorten

_CONNECT_SECONDS = 10.0
_CALL_SECONDS = 30.0
_POLL_SECONDS = 0.5


class ServerError(GenerationError):
    """The server answered with an error.

    Attributes:
        status: The HTTP status.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerGone(GenerationError):  # noqa: N818 - a state of the world
    """The server cannot be reached, hung up, or did not answer in time."""


class Replica:
    """A vLLM server.

    Args:
        url: Its base URL.

    Attributes:
        url: The same, without a slash at the end.
        model: The name that it knows the weights by.
        max_context: Most tokens of a row.
        backend: Its weight transfer backend; None without one.
        dtype: What it computes in, "float32" for instance; None where it does not say.
        generates: Whether it has the route that tells which weights drew which token.
        loads_adapters: Whether it takes LoRA adapters while it runs.
        lora_rank: Their highest rank.
        normalizes: Whether it normalizes pixels by itself; None where it does not say.
        engines: How many engines it spreads requests over, each with a prefix cache of its own.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"vllm_server_base_url: {url!r} is no URL such as http://localhost:8000.")
        self.host, self.port = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        self.model = ""
        self.max_context = 0
        self.backend: str | None = None
        self.dtype: str | None = None
        self.generates = False
        self.loads_adapters = False
        self.lora_rank = 0
        self.normalizes: bool | None = None
        self.engines = 1
        # No connection is kept: after an error vLLM's web server closes it, and the next request would run into that.
        self._client = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))

    def call(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float | None = None) -> Any:
        """Call a route and return the JSON of its answer, None if it has none.

        Raises:
            ServerError: The server says no.
            ServerGone: There is no answer.
        """
        limit = httpx.Timeout(timeout or _CALL_SECONDS, connect=_CONNECT_SECONDS)
        try:
            response = self._client.request(method, self.url + path, json=body, timeout=limit)
        except httpx.TransportError as error:
            raise gone(self.url, method, path, error) from error
        return read(response, method, path)

    async def ask(
        self,
        client: httpx.AsyncClient,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        seconds: float,
        engine: int | None = None,
    ) -> Any:
        """Do what `call` does without blocking, by one of the server's engines; hangs up when it is cancelled."""
        headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        try:
            async with asyncio.timeout(seconds):
                response = await client.request(method, self.url + path, json=body, headers=headers)
        except httpx.TransportError as error:
            raise gone(self.url, method, path, error) from error
        except TimeoutError as error:
            raise ServerGone(f"{method} {self.url}{path} had no answer within {seconds:g} s") from error
        return read(response, method, path)

    def is_up(self) -> bool:
        """Whether the server is there and healthy."""
        try:
            self.call("GET", "/health", timeout=5.0)
        except GenerationError:
            return False
        return True

    def wait_until_up(self, seconds: float) -> None:
        """Wait for the server to be healthy.

        Raises:
            GenerationError: It is not, after so many seconds.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                self.call("GET", "/health", timeout=5.0)
            except GenerationError as error:
                if time.monotonic() >= deadline:
                    raise GenerationError(
                        f"the vLLM server at {self.url} is not up after {seconds:g} s (vllm_server_timeout): {error}. "
                        "Start it with `vllm serve`, see docs/vllm.md."
                    ) from error
                time.sleep(_POLL_SECONDS)
            else:
                return

    def learn(self) -> None:
        """Ask the server what it serves.

        Raises:
            GenerationError: It does not say.
        """
        card = self.call("GET", "/v1/models")["data"][0]
        self.model, self.max_context = card["id"], int(card["max_model_len"])
        paths = self.call("GET", "/openapi.json", timeout=60.0)["paths"]
        self.generates = "/inference/v1/generate" in paths
        if "/server_info" not in paths:
            raise ConfigurationError(
                f"the vLLM server at {self.url} offers no routes for weights: start it with VLLM_SERVER_DEV_MODE=1."
            )
        config = self.call("GET", "/server_info?config_format=json", timeout=120.0)["vllm_config"]
        self.backend = (config.get("weight_transfer_config") or {}).get("backend")
        self.dtype = str(config.get("model_config", {}).get("dtype") or "").removeprefix("torch.") or None
        parallel = config.get("parallel_config") or {}
        if not parallel.get("data_parallel_external_lb"):  # there each engine has an address of its own
            local = "_local" if parallel.get("data_parallel_hybrid_lb") else ""
            self.engines = int(parallel.get(f"data_parallel_size{local}") or 1)
        multimodal = config.get("model_config", {}).get("multimodal_config") or {}
        self.normalizes = multimodal.get("mm_device_do_normalize")
        lora = config.get("lora_config") or {}
        self.loads_adapters = bool(lora) and "/v1/load_lora_adapter" in paths
        self.lora_rank = int(lora.get("max_lora_rank") or 0)

    def weights_version(self) -> str:
        """What the server calls its weights; "default" after a start."""
        return str(self.call("GET", "/weight_info", timeout=5.0)["weight_version"])


def gone(url: str, method: str, path: str, error: Exception) -> ServerGone:
    """Say that there was no answer."""
    return ServerGone(f"{method} {url}{path} had no answer: {type(error).__name__}: {error}")


def read(response: httpx.Response, method: str, path: str) -> Any:
    """Return the JSON of an answer, or its text where it is not JSON.

    Raises:
        ServerError: The status is an error.
    """
    if response.is_success and not response.content:
        return None
    try:
        answer = response.json()
    except ValueError:
        answer = response.text
    where = f"{method} {response.request.url.copy_with(query=None)}"
    if response.is_success:
        return answer
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    text = error.get("message", error) if isinstance(error, dict) else error
    raise ServerError(f"{where} answered {response.status_code}: {shorten(str(text), 2000)}", response.status_code)

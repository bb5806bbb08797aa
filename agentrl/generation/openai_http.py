"""A model behind a server that speaks OpenAI's protocol: what all of its routes have in common."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx

from agentrl.errors import ConfigurationError, ContextFull, GenerationError
from agentrl.generation.base import GenerationStats

ATTEMPTS = 3
"""How often a turn is asked for when the connection breaks or the server is at fault (5xx) or busy (429)."""

_FULL = re.compile(r"context[ _](length|size|window)", re.IGNORECASE)
"""How servers say that a conversation is too long: OpenAI by a code, vLLM, llama.cpp and others in words."""


class OpenAIServer:
    """One model of a server, whose weights are its own business; what is left of `Generator` is to sample.

    Args:
        url: The server, with or without `/v1`.
        model: The name it serves the model by; None where it serves one only.
        api_key: Sent as a bearer token.
        timeout: Seconds that a turn may take.

    Attributes:
        url: Without `/v1`.
        model: The model's name there.
        max_context: The context length, None if the server does not say.
        stats: Counters.

    Raises:
        ConfigurationError: There is no such server, or it does not serve such a model.
    """

    owns_weights = True

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 600.0
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeout = timeout
        self._clients: dict[asyncio.AbstractEventLoop, httpx.AsyncClient] = {}
        self.stats = GenerationStats()
        self.model, self.max_context = self._served(model)

    async def ask(self, route: str, body: dict[str, Any]) -> Any:
        """Post a request and give back the answer's JSON, or its text where it has none.

        Raises:
            ContextFull: The conversation does not fit the server's context.
            GenerationError: The server refuses the request otherwise, or did not answer any attempt.
        """
        loop = asyncio.get_running_loop()
        if (client := self._clients.get(loop)) is None:
            limits = httpx.Limits(max_connections=None)
            client = httpx.AsyncClient(headers=self._headers, timeout=self._timeout, limits=limits)
            self._clients[loop] = client
        for attempt in range(1, ATTEMPTS + 1):
            try:
                reply = await client.post(f"{self.url}/v1/{route}", json=body)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if reply.status_code < 400:
                    return _json(reply)
                problem = f"HTTP {reply.status_code}: {reply.text[:300]}"
                if reply.status_code == httpx.codes.BAD_REQUEST and _is_full(reply.text):
                    raise ContextFull(f"the conversation does not fit the context at {self.url}: {problem}")
                if reply.status_code < 500 and reply.status_code != httpx.codes.TOO_MANY_REQUESTS:
                    break
            if attempt < ATTEMPTS:
                await asyncio.sleep(2.0 ** (attempt - 1))
        raise GenerationError(f"the server at {self.url} did not sample a turn: {problem}")

    def release(self, session: str) -> None:
        """The server forgets by itself."""

    def sync(self, weights_version: int) -> None:
        """The server's weights do not change."""

    def close(self) -> None:
        """Forget the connections; they end with the loops that they belong to."""
        self._clients.clear()

    def _served(self, wanted: str | None) -> tuple[str, int | None]:
        """The name and the context length of the model."""
        try:
            reply = httpx.get(f"{self.url}/v1/models", headers=self._headers, timeout=30.0)
            reply.raise_for_status()
            cards = {card["id"]: card for card in reply.json()["data"]}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{self.url}/v1/models does not answer as an OpenAI-compatible server: {error}"
            ) from error
        if wanted is None and len(cards) == 1:
            [wanted] = cards
        if wanted is None or wanted not in cards:
            raise ConfigurationError(f"{self.url} serves {sorted(cards)}, not {wanted!r}; name one of them")
        length = cards[wanted].get("max_model_len")
        return wanted, length if isinstance(length, int) else None


def _is_full(refusal: str) -> bool:
    """Whether a refusal is about the conversation's length; one of `max_tokens` has another remedy."""
    return _FULL.search(refusal) is not None and "max_tokens" not in refusal


def _json(reply: httpx.Response) -> Any:
    try:
        return reply.json()
    except ValueError:
        return reply.text

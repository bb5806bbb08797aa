"""Sampling from `vllm serve`: token ids out, token ids and logprobs back, the weights pushed by the trainer.

Each turn is a request of its own, so no rollout waits for another one. All turns of a rollout go to one engine (a
server's only one, or one of those that it shares requests among), whose prefix cache then has its row; all engines of
all servers share the rollouts.

A server that goes away is waited for. Whoever needs a turn from it asks again when it is back with the right weights,
which the first process pushes as soon as it sees it; sampling a turn twice does no harm. Only the turns in flight are
lost.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import httpx

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.base import GenerationStats, SamplingParams, require_room
from agentrl.generation.processes import by_first, is_first
from agentrl.generation.vllm_http import Replica, ServerError, ServerGone
from agentrl.generation.vllm_images import require_msgpack
from agentrl.generation.vllm_protocol import check_sampling, drawn_by, read_turn, turn_request
from agentrl.types import ImageSpan, Sample

logger = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
"""How often the first process looks whether a server has come back without its weights."""
POLL_SECONDS = 1.0
"""How often a rollout looks whether its server is back."""
ATTEMPTS = 4
"""How often a turn is asked for, when its server goes away meanwhile or answers with an error of its own (HTTP 5xx)."""


class Push(Protocol):
    """Takes weights to one server."""

    model: str
    """The name by which the server then knows the policy."""

    def push(self, version: int) -> None:
        """Make the server sample from the policy as it is now; raises `GenerationError`."""

    def close(self) -> None:
        """Part from the server."""


class Home(NamedTuple):
    """Where the turns of a rollout are sampled.

    Attributes:
        replica: The server.
        engine: Which of its engines, None if it has one.
    """

    replica: Replica
    engine: int | None

    def __str__(self) -> str:
        return self.replica.url if self.engine is None else f"{self.replica.url} (engine {self.engine})"


class VllmServerGenerator:
    """Implements `Generator` on vLLM servers.

    Args:
        pushes: The servers, each with what takes weights to it. Only the first process uses the latter.
        sampling: How turns will be drawn, for checks.
        extras: Further sampling parameters of vLLM, see `agentrl.generation.vllm_protocol.EXTRAS`.
        regex: What each turn's text has to match.
        sees_images: Whether rows may have images.
        timeout: Seconds to wait for a server, at the start and whenever it goes away.
        request_timeout: Seconds that a turn may take before it is asked for again.

    Raises:
        ConfigurationError: The trainer would not score what these servers sample.
        GenerationError: A server is not up.
    """

    def __init__(
        self,
        pushes: Sequence[tuple[Replica, Push | None]],
        *,
        sampling: SamplingParams,
        extras: Mapping[str, Any] | None = None,
        regex: str | None = None,
        sees_images: bool = False,
        timeout: float = 240.0,
        request_timeout: float = 1800.0,
    ) -> None:
        self._extras, self._regex = dict(extras or {}), regex
        check_sampling(sampling, self._extras)
        self._pushes = list(pushes)
        self._replicas = [replica for replica, _ in self._pushes]
        self._timeout, self._request_timeout = timeout, request_timeout
        for replica in self._replicas:
            check_logprobs(replica)
            if sees_images:
                check_images(replica)
        self.stats = GenerationStats()
        self._homes: dict[str, Home] = {}
        self._guests = dict.fromkeys((home for replica in self._replicas for home in homes_of(replica)), 0)
        self._away: set[str] = set()
        self._waiting: asyncio.Task[None] | None = None
        self._models = {replica.url: replica.model for replica in self._replicas}
        self._version: int | None = None
        self._still = False  # the policy is what was pushed
        self._pushing = threading.Lock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._client: httpx.AsyncClient | None = None
        self._client_loop: asyncio.AbstractEventLoop | None = None

    @property
    def owns_weights(self) -> bool:
        """The servers have their own."""
        return True

    @property
    def max_context(self) -> int | None:
        """The shortest context of the servers."""
        return min(replica.max_context for replica in self._replicas)

    @property
    def exact(self) -> bool:
        """Whether the servers compute in float32, so that their logprobs are to be the trainer's."""
        return all(replica.dtype == "float32" for replica in self._replicas)

    async def sample(
        self, session: str, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> Sample:
        """Sample one turn; see `Generator.sample`. Cancelling the awaiting task ends the request on the server."""
        require_room(session, ids, params, self.max_context)
        for attempt in range(1, ATTEMPTS + 1):
            home = self._home(session)
            try:
                sample = await self._ask(home, ids, params, images)
            except ServerError as error:
                if error.status < 500 or attempt == ATTEMPTS:
                    raise GenerationError(f"session {session!r}: {error}") from error
                logger.warning("%s; attempt %d of %d", error, attempt + 1, ATTEMPTS)
                await asyncio.sleep(POLL_SECONDS * attempt)
            except ServerGone as error:
                if attempt == ATTEMPTS:
                    raise GenerationError(f"session {session!r}: {error}, the last of {ATTEMPTS} attempts") from error
                await self._until_back(home.replica, error)
                self.release(session)  # to wherever there is a server that answers
            else:
                self.stats.decoded_tokens += len(sample.ids)
                return sample
        raise AssertionError("every attempt ends in a sample or an error")

    async def probe(
        self, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> dict[str, Sample]:
        """Sample the same turn on every engine of every server, for comparison with the trainer."""
        return {str(home): await self._ask(home, ids, params, images) for home in self._guests}

    def release(self, session: str) -> None:
        """Forget where a session is."""
        home = self._homes.pop(session, None)
        if home is not None:
            self._guests[home] -= 1

    def sync(self, weights_version: int) -> None:
        """Push the policy's weights to every server; see `Generator.sync`."""
        self._models = by_first(lambda: self._push_all(weights_version))
        self._version = weights_version

    def wake(self) -> None:
        """The policy stays as it is; see `Phased`. A server that comes back gets it, under the version of `sync`."""
        with self._pushing:
            self._still = True

    def rest(self) -> None:
        """The policy may change from here on; see `Phased`. A server that comes back waits for `wake`."""
        with self._pushing:
            self._still = False

    def close(self) -> None:
        """Part from the servers; a later `sync` connects again."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None
        for _, push in self._pushes:
            if push is not None and is_first():
                push.close()
        for session in list(self._homes):
            self.release(session)

    # Turns ------------------------------------------------------------------------------------------------------

    def _home(self, session: str) -> Home:
        """Where a session is, at first the engine with the fewest sessions of those whose server answers."""
        if session not in self._homes:
            home = min(self._guests, key=lambda one: (one.replica.url in self._away, self._guests[one]))
            self._homes[session] = home
            self._guests[home] += 1
        return self._homes[session]

    async def _ask(
        self, home: Home, ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan] = ()
    ) -> Sample:
        """Ask for a turn, and see to it that the policy's weights draw it, not those that a server starts with."""
        version, replica = self._version, home.replica
        path, body = turn_request(
            self._models[replica.url],
            ids,
            params,
            self._extras,
            self._regex,
            images=images,
            generates=replica.generates,
        )
        if not replica.generates:  # its reply will not say; and a server that starts anew now hangs up
            info = await replica.ask(self._http(), "GET", "/weight_info", None, 60.0)
            self._require_pushed(replica, [str(info["weight_version"])])
        reply = await replica.ask(self._http(), "POST", path, body, self._request_timeout, home.engine)
        sample = read_turn(reply, ids, params, version or 0)
        self._require_pushed(replica, drawn_by(reply))
        return sample

    def _require_pushed(self, replica: Replica, names: Sequence[str]) -> None:
        if self._version is not None and not all(name.isdecimal() for name in names):
            raise ServerGone(f"the vLLM server at {replica.url} has started anew, without the policy's weights")

    def _http(self) -> httpx.AsyncClient:
        """A client for the running loop. It keeps no connections, so it can be dropped together with its loop."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client_loop is not loop:
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
            self._client = httpx.AsyncClient(limits=limits, timeout=httpx.Timeout(None, connect=10.0))
            self._client_loop = loop
        return self._client

    async def _until_back(self, replica: Replica, error: ServerGone) -> None:
        """Wait until a server, this one or another, answers and has the policy's weights; all turns wait together.

        Raises:
            GenerationError: There is none in time.
        """
        waiting = self._waiting
        if waiting is None or waiting.done() or waiting.get_loop() is not asyncio.get_running_loop():
            waiting = self._waiting = asyncio.create_task(self._look_out(replica, error))
        await asyncio.shield(waiting)

    async def _look_out(self, replica: Replica, error: ServerGone) -> None:
        self._away.add(replica.url)
        logger.warning(
            "%s; waiting up to %g s for the server (vllm_server_timeout). Finished turns are kept.",
            error,
            self._timeout,
        )
        deadline = time.monotonic() + self._timeout
        while time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
            for one in self._replicas:
                if await asyncio.to_thread(self._is_ready, one):
                    self._away.discard(one.url)
                    logger.warning("the vLLM server at %s answers", one.url)
                    return
        raise GenerationError(
            f"the vLLM server at {replica.url} did not come back within {self._timeout:g} s (vllm_server_timeout): "
            f"{error}"
        ) from error

    def _is_ready(self, replica: Replica) -> bool:
        try:
            return replica.is_up() if self._version is None else replica.weights_version() == str(self._version)
        except GenerationError:
            return False

    # Weights ----------------------------------------------------------------------------------------------------

    def _push_all(self, version: int) -> dict[str, str]:
        """Push to every server; returns by which name each of them knows the policy from now on."""
        with self._pushing:
            for replica, push in self._pushes:
                if push is not None:
                    self._push(replica, push, version)
            self._version, self._still = version, True
        if self._watcher is None and any(push for _, push in self._pushes):
            self._closed.clear()
            self._watcher = threading.Thread(target=self._watch, name="agentrl-vllm-watch", daemon=True)
            self._watcher.start()
        return {replica.url: replica.model if push is None else push.model for replica, push in self._pushes}

    def _push(self, replica: Replica, push: Push, version: int) -> None:
        """Push to one server; one that has gone away is waited for."""
        try:
            push.push(version)
        except GenerationError as error:
            if replica.is_up():
                raise
            logger.warning("%s; waiting up to %g s for the server (vllm_server_timeout)", error, self._timeout)
            replica.wait_until_up(self._timeout)
            push.push(version)

    def _watch(self) -> None:
        """Push the weights again to a server that has come back without them."""
        while not self._closed.wait(WATCH_SECONDS):
            for replica, push in self._pushes:
                with self._pushing:
                    version = self._version
                    try:
                        if push is None or not self._still or replica.weights_version() == str(version):
                            continue
                        assert version is not None
                        logger.warning("the vLLM server at %s has come back; pushing the weights again", replica.url)
                        push.close()
                        push.push(version)
                    except GenerationError as error:
                        logger.info("not back yet: %s", error)


def homes_of(replica: Replica) -> list[Home]:
    """The engines of a server."""
    return (
        [Home(replica, engine) for engine in range(replica.engines)] if replica.engines > 1 else [Home(replica, None)]
    )


def check_images(replica: Replica) -> None:
    """Check that a server takes the trainer's token ids and pixels together.

    Raises:
        ConfigurationError: It does not.
    """
    require_msgpack()
    if not replica.generates:
        raise ConfigurationError(
            f"the vLLM server at {replica.url} has no /inference/v1/generate, and its other routes read images by "
            "themselves, so that their rows may differ from the trainer's; start it with --enable-scale-out."
        )
    if replica.normalizes is not False:
        raise ConfigurationError(
            f"the vLLM server at {replica.url} normalizes pixels by itself, and the trainer's are normalized already; "
            "start it with --no-mm-device-do-normalize."
        )


def check_logprobs(replica: Replica) -> None:
    """Check that a server reports the logprobs of the distribution that it draws from.

    Where top-p leaves one token, its logprob is 0; the model's own is less.

    Raises:
        ConfigurationError: It does not.
    """
    params = SamplingParams(max_tokens=1, top_p=1e-6)
    path, body = turn_request(replica.model, [0], params, {}, generates=replica.generates)
    sample = read_turn(replica.call("POST", path, body, timeout=120.0), [0], params, 0)
    if abs(sample.logprobs[0]) > 1e-6:
        raise ConfigurationError(
            f"the vLLM server at {replica.url} reports logprobs from before temperature, top-k and the like; start it "
            "with --logprobs-mode processed_logprobs."
        )

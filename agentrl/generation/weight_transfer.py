"""Weights on their way to a vLLM server, through its own transfer routes.

An update is: pause (requests in flight are kept), start, receive, finish, forget cached prefixes, resume. While the
server receives, the trainer sends; both sides are given up when one of them fails, each wait has a limit, and whatever
happens the server is resumed and left able to answer. How tensors travel is a `Channel`, of the backend that the server
was started with: gloo without GPUs (needs `agentrl.generation.vllm_worker` in the server), those of
`agentrl.generation.gpu_channels` with them.
"""

from __future__ import annotations

import functools
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from agentrl.errors import ConfigurationError, GenerationError
from agentrl.generation.gloo import broadcast, join
from agentrl.generation.vllm_http import Replica, ServerError
from agentrl.generation.weights import PolicyWeights

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Part(NamedTuple):
    """A piece of an update.

    Attributes:
        info: What the server is told in `/update_weights`.
        send: What the trainer does while the server receives; None where what it was told is enough.
    """

    info: dict[str, Any]
    send: Callable[[], None] | None = None


class Channel(Protocol):
    """Carries tensors from the trainer, rank 0, to all workers of one server."""

    backend: str

    def invitation(self, world_size: int) -> dict[str, Any]:
        """What the server has to be told for the next `open`."""

    def open(self, world_size: int) -> None:
        """Meet the workers; blocks until they have come."""

    def parts(self, weights: PolicyWeights) -> Iterator[Part]:
        """What an update consists of; the server has a part before the next one is asked for."""

    def close(self) -> None:
        """Part from the workers; ends an `open` or `send` of another thread if the transport can."""


class GlooChannel:
    """Broadcasts by gloo, on the CPU.

    Args:
        address: Where the server's workers reach this process.
        port: Of the store where they meet.
        timeout: Seconds that a meeting or a tensor may take.
    """

    backend = "gloo"

    def __init__(self, address: str, port: int, timeout: float) -> None:
        self._address, self._port, self._timeout = address, port, timeout
        self._meeting = ""
        self._group: ProcessGroupGloo | None = None

    def invitation(self, world_size: int) -> dict[str, Any]:
        """See `Channel`; a new meeting each time, so that those who come late to an old one disturb nobody."""
        _store(self._port)
        self._meeting = uuid.uuid4().hex
        return {
            "master_address": self._address,
            "master_port": self._port,
            "meeting": self._meeting,
            "rank_offset": 1,
            "world_size": world_size,
            "timeout": self._timeout,
        }

    def open(self, world_size: int) -> None:
        """See `Channel`."""
        self._group = join(PrefixStore(self._meeting, _store(self._port)), 0, world_size, self._timeout)

    def parts(self, weights: PolicyWeights) -> Iterator[Part]:
        """See `Channel`."""
        yield Part(listed(weights.described()), functools.partial(self._send, weights))

    def _send(self, weights: PolicyWeights) -> None:
        assert self._group is not None
        for _, tensor in weights:
            broadcast(self._group, tensor.cpu().contiguous())

    def close(self) -> None:
        """See `Channel`."""
        self._group = None


@functools.cache
def _store(port: int) -> TCPStore:
    """Where workers meet this process; one for each port, as long as the process lives."""
    try:
        return TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    except Exception as error:
        raise ConfigurationError(f"vllm_group_port={port} cannot be listened on: {error}") from error


class WeightTransfer:
    """Sends the policy's weights to one server.

    Args:
        server: The server.
        weights: What is sent.
        channel: How it travels.
        timeout: Seconds that each step of an update may take.
    """

    def __init__(self, server: Replica, weights: PolicyWeights, channel: Channel, timeout: float) -> None:
        self._server, self._weights, self._channel, self._timeout = server, weights, channel, timeout
        self.model = server.model
        self._sees_images = weights.sees_images
        self._open = False
        self._pushed = ""

    def push(self, version: int) -> None:
        """Make the server sample from the policy's weights as they are now.

        Raises:
            GenerationError: The update failed, with the server's words; the server answers again, but nobody can say
                from which weights until a later update succeeds.
        """
        if self._open and self._server.weights_version() != self._pushed:
            self.close()  # it has been started anew meanwhile
        if not self._open:
            self._connect()
        self._post("/pause?mode=keep")
        try:
            self._begin()
            self._stream()
            self._post("/finish_weight_update", {"weight_version": str(version)})
            # Also of turns in flight: they go on as the new weights would, had they read the row themselves.
            self._post("/reset_prefix_cache?reset_running_requests=true")
            if self._sees_images:  # features of old weights
                self._post("/reset_encoder_cache")
            self._pushed = str(version)
        except BaseException:
            self.close()
            self._mend()
            raise
        finally:
            with suppress(GenerationError):  # of a server that is gone, which the first error has told
                self._post("/resume")

    def close(self) -> None:
        """Part from the server; the next `push` connects again."""
        self._open = False
        self._channel.close()

    def _connect(self) -> None:
        world_size = 1 + int(self._server.call("GET", "/get_world_size")["world_size"])
        invitation = {"init_info": self._channel.invitation(world_size)}
        self._both(
            lambda: self._post("/init_weight_transfer_engine", invitation), lambda: self._channel.open(world_size)
        )
        self._open = True

    def _begin(self) -> None:
        try:
            self._post("/start_weight_update")
        except ServerError as error:
            if "already active" not in str(error):
                raise
            self._post("/finish_weight_update")  # of a trainer that was killed in the middle
            self._post("/start_weight_update")

    def _stream(self) -> None:
        for part in self._channel.parts(self._weights):
            request = functools.partial(self._post, "/update_weights", {"update_info": part.info})
            if part.send is None:
                request()
            else:
                self._both(request, part.send)

    def _both(self, server: Callable[[], Any], trainer: Callable[[], Any]) -> None:
        """Let the server and the trainer do what they can only do together."""
        theirs, ours = _start(server), _start(trainer)
        wait([theirs, ours], self._timeout, FIRST_EXCEPTION)
        late = not (theirs.done() or ours.done())
        failed = late or any(side.done() and side.exception() for side in (theirs, ours))
        if not failed:
            return
        self._channel.close()
        wait([theirs], 5.0)  # the server may know better what went wrong, and says so soon
        errors = [str(side.exception()) for side in (ours, theirs) if side.done() and side.exception()]
        if late:
            errors.insert(0, f"no end after {self._timeout:g} s (vllm_server_timeout)")
        raise GenerationError(f"the weights could not be sent to the vLLM server: {'; '.join(errors)}")

    def _mend(self) -> None:
        """End an update that broke off, which gives layers that got nothing their old weights back."""
        for path in ("/start_weight_update", "/finish_weight_update"):
            with suppress(GenerationError):  # nothing to end, or no server
                self._post(path)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._server.call("POST", path, body, timeout=self._timeout)


def _start(function: Callable[[], T]) -> Future[T]:
    """Run in a daemon thread, which nobody has to wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks
            future.set_exception(error)

    threading.Thread(target=run, name="agentrl-transfer", daemon=True).start()
    return future


def listed(described: Sequence[tuple[str, torch.dtype, Sequence[int]]]) -> dict[str, Any]:
    """Name, dtype and shape of tensors as every backend of vLLM wants to be told them."""
    return {
        "names": [name for name, _, _ in described],
        "dtype_names": [str(dtype).removeprefix("torch.") for _, dtype, _ in described],
        "shapes": [list(shape) for _, _, shape in described],
    }


def address_towards(host: str, port: int) -> str:
    """This machine's address as another one sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return str(probe.getsockname()[0])

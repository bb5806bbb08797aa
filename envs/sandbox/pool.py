"""Sandboxes that are ready before they are asked for: the next one starts while the model thinks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from concurrent.futures import Future
from typing import Self

from agentrl.envs.sandbox.base import Backend, Sandbox, SandboxFailure, SandboxSpec

CLOSE_SECONDS = 60.0
"""How long `close` waits for sandboxes that are being started."""


class SandboxPool:
    """Sandboxes of one spec. Each is used once: what one rollout left behind is not there for the next.

    The pool belongs to no event loop. What it has started ends with its `with` block, with its `close` or with this
    process: without the first two, what is kept ready stays until the process ends.

    Args:
        backend: Starts them.
        spec: What they are.
        warm: How many are kept ready beyond those in use.

    Raises:
        ConfigurationError: The backend cannot use the spec.
    """

    def __init__(self, backend: Backend, spec: SandboxSpec, *, warm: int = 1) -> None:
        backend.check(spec)
        self.spec = spec
        self._backend = backend
        self._warm = warm
        self._lock = threading.Lock()
        self._ready: deque[Future[Sandbox]] = deque()
        self._out: set[Sandbox] = set()
        self._closed = False

    async def take(self) -> Sandbox:
        """A fresh sandbox; the next one is started meanwhile.

        Raises:
            SandboxFailure: It could not be started, or the pool is closed.
        """
        with self._lock:
            if self._closed:
                raise SandboxFailure("the sandbox pool is closed")
            coming = self._ready.popleft() if self._ready else self._begin()
            while len(self._ready) < self._warm:
                self._ready.append(self._begin())
        try:
            sandbox = await asyncio.shield(asyncio.wrap_future(coming))
        except asyncio.CancelledError:
            self._return(coming)
            raise
        with self._lock:
            if not self._closed:
                self._out.add(sandbox)
                return sandbox
        await sandbox.stop()
        raise SandboxFailure("the sandbox pool was closed")

    async def give_back(self, sandbox: Sandbox) -> None:
        """Stop a sandbox that was taken."""
        try:
            await sandbox.stop()
        finally:
            with self._lock:
                self._out.discard(sandbox)

    async def close(self) -> None:
        """Stop every sandbox, also those in use and those that are being started."""
        with self._lock:
            self._closed = True
            coming, self._ready = list(self._ready), deque()
            out, self._out = self._out, set()
        await asyncio.gather(*(sandbox.stop() for sandbox in out), *(_stop_coming(each) for each in coming))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        # In a thread, since notebooks have a running loop in theirs.
        closing = threading.Thread(target=lambda: asyncio.run(self.close()))
        closing.start()
        closing.join()

    def _begin(self) -> Future[Sandbox]:
        coming: Future[Sandbox] = Future()
        threading.Thread(target=self._start, args=(coming,), name="agentrl-sandbox", daemon=True).start()
        return coming

    def _start(self, coming: Future[Sandbox]) -> None:
        try:
            coming.set_result(self._backend.start_blocking(self.spec))
        except BaseException as error:  # noqa: BLE001 (whoever takes it is told)
            coming.set_exception(error)

    def _return(self, coming: Future[Sandbox]) -> None:
        """Keep for the next one what its taker does not want any more."""
        with self._lock:
            if not self._closed:
                self._ready.appendleft(coming)
                return
        coming.add_done_callback(lambda done: None if done.exception() else done.result()._stop())


async def _stop_coming(coming: Future[Sandbox]) -> None:
    with contextlib.suppress(Exception):  # it could not be started
        sandbox = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(coming)), CLOSE_SECONDS)
        await sandbox.stop()

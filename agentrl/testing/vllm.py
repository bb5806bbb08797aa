"""A real `vllm serve` on the CPU for tests and benchmarks: it can be killed, and started again at the same address.

What makes vLLM's CPU build exact, small and fast enough is set here; docs/vllm.md says why.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import agentrl

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(agentrl.__file__).parents[1]),
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the default takes most of the memory
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}
"""What vLLM on the CPU needs in its environment, as a server and in a process."""


def free_port() -> int:
    """Return a port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """A server with weights over gloo; entering starts it, leaving ends it. `start` does not wait until it answers.

    Args:
        executable: vLLM's command, of an environment of its own.
        model: A folder with the model and its tokenizer.
        folder: Where it runs and writes `server.log`.
        options: Further arguments of `vllm serve`.
        environment: Further variables of its environment.

    Attributes:
        url: Its address.
    """

    def __init__(
        self,
        executable: Path,
        model: Path,
        folder: Path,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder, self._port = folder, free_port()
        self._environment = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self.url = f"http://127.0.0.1:{self._port}"
        self._command = [str(executable), "serve", str(model), "--host", "127.0.0.1", "--port", str(self._port)]
        self._command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--enable-scale-out"]
        self._command += ["--no-enable-chunked-prefill", "--logprobs-mode", "processed_logprobs"]
        self._command += ["--max-logprobs", "-1", "--weight-transfer-config", '{"backend": "gloo"}']
        self._command += ["--worker-extension-cls", "agentrl.generation.vllm_worker.Extension", *options]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, with the weights of the model's folder."""
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self._folder, env=self._environment, stdout=log, stderr=log, process_group=0
            )

    def kill(self) -> None:
        """End all its processes at once, as `kill -9` does."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

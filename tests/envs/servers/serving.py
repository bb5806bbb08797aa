"""The nursery's side, run by the servers' interpreter: fork a process for each server that is asked for."""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

PR_SET_PDEATHSIG = 1


def nursery(worlds: Mapping[str, Callable[..., Any]]) -> None:
    """Answer each line of stdin with a server's process and port, until stdin ends.

    Args:
        worlds: Make an ASGI application from options, by name.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin:
        asked = json.loads(line)
        # asyncio switches Nagle's algorithm off only where a socket names its protocol: 40 ms a request otherwise.
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", asked["port"]))
        listening.listen(128)
        pid = os.fork()
        if pid == 0:
            _serve(worlds[asked["world"]], asked["options"], listening)
        print(json.dumps({"pid": pid, "port": listening.getsockname()[1]}), flush=True)
        listening.close()


def _serve(world: Callable[..., Any], options: Mapping[str, Any], listening: socket.socket) -> None:
    import uvicorn

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the nursery's answers are its own
    try:
        uvicorn.Server(uvicorn.Config(world(**options), log_level="error")).run(sockets=[listening])
    finally:
        sys.stderr.flush()
        os._exit(0)  # nothing of the nursery's is this process's to end

"""Ending what a hung call is at: a thread cannot be killed, but what it waits for can.

Two things are done to a thread that was left behind. An exception is raised inside it, which Python delivers before
the thread's next bytecode: an endless loop in Python ends, a wait in C code (a socket without a timeout, a lock) goes
on until it returns. And the processes that it started during the call are killed with all of their descendants,
which ends the most frequent wait in C code, that for a child process.

Linux knows which *thread* started a process (`/proc/PID/task/TID/children`), whatever session or group the process
put itself into. Not found are processes whose parent has died (daemons), those started by a further thread that the
call made, and any on other systems, where only the exception is raised.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

_OWN_THREAD_ONLY = 0x20000000
"""`__WNOTHREAD` of waitid(2): children of other threads do not count. Linux only."""

_WITH_THE_INTERPRETER = ctypes.PyDLL(None) if sys.platform == "linux" else None
"""The C library, called without giving the interpreter lock away: `os.waitid` would queue for it behind all other
threads to get it back, for a hundred times as long as the call itself takes."""

_SWEEPS = 5
"""Times the descendants are looked up, since they may be starting more while they are being killed."""


class Abandoned(BaseException):
    """Raised inside a call that was left behind."""


def own_children() -> frozenset[int]:
    """Processes that the calling thread has started and not yet waited for; costs microseconds when there are none."""
    if _WITH_THE_INTERPRETER is None:
        return frozenset()
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT | _OWN_THREAD_ONLY
    if _WITH_THE_INTERPRETER.waitid(os.P_ALL, 0, None, options) == -1:  # no child
        return frozenset()
    return _children(threading.get_native_id())


def end(thread: threading.Thread, spared: frozenset[int]) -> None:
    """Raise `Abandoned` in a thread and kill the processes that it started, but for some.

    Args:
        thread: A thread that is inside a call.
        spared: What it had started before that call: those belong to somebody else.
    """
    assert thread.ident is not None
    assert thread.native_id is not None
    # First, so that the thread starts nothing more once its child has gone.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Abandoned))
    for _ in range(_SWEEPS):
        started = [psutil.Process(pid) for pid in _children(thread.native_id) - spared if psutil.pid_exists(pid)]
        family = [process for process in started if _alive(process)]
        for process in started:
            with suppress(psutil.Error):
                family += [child for child in process.children(recursive=True) if _alive(child)]
        if not family:
            return
        for process in family:
            with suppress(psutil.Error):
                process.kill()


def place(thread: threading.Thread) -> str:
    """Where a thread is, for messages: the innermost Python line."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nowhere"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _children(thread_id: int) -> frozenset[int]:
    try:
        return frozenset(map(int, Path(f"/proc/self/task/{thread_id}/children").read_text().split()))
    except OSError:  # the thread has ended, or the system has no such file
        return frozenset()


def _alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False

"""SIGTERM, as schedulers send it before they kill a job: the run saves a checkpoint and leaves in time.

Where rollouts are being played, that is at once: what they have is in the journal, and nothing was learned since the
last optimizer step. In the midst of an optimizer step it is at its end. A tool that hangs or a disk that is slow does
not hold the process up: when the grace time is over it ends, as it is. The exit code is 143 either way, as of any
process that SIGTERM ends. With `save_strategy="no"` it leaves without a checkpoint.

Of several processes all leave together, whichever of them got the signal: they agree on it where they meet anyway, when
rollouts are gathered and when an optimizer step ends. One that was not told plays its rollouts to their end first.

A handler of somebody else (`enable_jit_checkpoint`, a launcher) is left in its place, and does what it does.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from accelerate.utils import reduce
from transformers import TrainerCallback

logger = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM


class Preempted(BaseException):
    """Raised in the main thread where it waits for rollouts or rewards; like `KeyboardInterrupt` no error."""


class Preemption(TrainerCallback):
    """Listens for SIGTERM while a run trains in the main thread.

    Args:
        grace: Most seconds from the signal to the end of the process; None: the signal is not listened for.

    Attributes:
        requested: Whether the signal came, to this process or (known from the end of a step on) to another one.
    """

    def __init__(self, grace: float | None) -> None:
        self._grace = grace
        self._pid = os.getpid()
        self._listening = False
        self._interruptible = False
        self.requested = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen inside, if nobody else does."""
        main = threading.current_thread() is threading.main_thread()
        if self._grace is None or not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._on_signal)
        self._listening = True
        try:
            yield
        finally:
            self._listening = False
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, the signal raises.

        Raises:
            Preempted: It came, now or before.
        """
        if self.requested and self._listening:
            raise Preempted
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Called by the trainer after an optimizer step: have it saved, and be the last."""
        if args.world_size > 1 and self._grace is not None:
            asked = torch.tensor(float(self.requested), device=args.device)
            self.requested = bool(reduce(asked, "sum") > 0)
        if self.requested:
            control.should_save = args.save_strategy != "no"
            control.should_training_stop = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child has the handler too
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.requested:
            return
        self.requested = True
        threading.Thread(target=self._end_in_time, name="agentrl-preemption", daemon=True).start()
        if self._interruptible:
            self._interruptible = False
            raise Preempted

    def _end_in_time(self) -> None:
        """End the process when the grace time is over; logs here, where no other log call was interrupted."""
        logger.warning("SIGTERM: the run saves and leaves, within %g s (preemption_grace)", self._grace)
        time.sleep(self._grace or 0)
        logger.error("the run did not leave within %g s of SIGTERM, and ends as it is", self._grace)
        os._exit(EXIT_CODE)

"""What can go wrong with a Harbor task at run time, and whether another attempt may help."""

from __future__ import annotations

from enum import Enum

from agentrl.errors import EnvironmentFailure


class Fault(Enum):
    """Why an episode has no reward. All of these are the environment's; none is the model's."""

    BUILD = "the image cannot be built"
    HEALTHCHECK = "the health check failed"
    TESTS = "the tests cannot be put into the sandbox"
    SETUP = "a step cannot be set up"
    VERIFIER_TIMEOUT = "the verifier took too long"
    REWARD_MISSING = "the verifier wrote no reward"
    REWARD_EMPTY = "the verifier's reward file is empty"
    REWARD_UNREADABLE = "the verifier's reward cannot be read"

    @property
    def retry(self) -> bool:
        """Whether another attempt may end differently. A verifier that broke would break again, and cost as much."""
        return self in (Fault.BUILD, Fault.HEALTHCHECK, Fault.TESTS, Fault.SETUP)


class HarborFailure(EnvironmentFailure):
    """A task that could not be started or verified.

    Attributes:
        fault: What went wrong.
        retry: Whether the rollout is tried again.
    """

    def __init__(self, fault: Fault, details: str) -> None:
        super().__init__(f"{fault.value}: {details}")
        self.fault = fault
        self.retry = fault.retry

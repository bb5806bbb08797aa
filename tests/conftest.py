"""What holds for all tests.

Hypothesis asks for the same examples in each run, and none of them for how long it took. And Ctrl-C works, also in a
run that was begun in the background: a shell has such processes ignore it, and what they start inherits that. Trackio,
which asks for its folder when it is imported, by whichever test, has one that nobody else uses.
"""

import os
import shutil
import signal
import tempfile

from hypothesis import HealthCheck, settings

signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "agentrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("agentrl")

os.environ["TRACKIO_DIR"] = tempfile.mkdtemp(prefix="agentrl-trackio-")


def pytest_unconfigure():
    shutil.rmtree(os.environ["TRACKIO_DIR"], ignore_errors=True)

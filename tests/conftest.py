"""What holds for all tests.

Hypothesis asks for the same examples in each run, and none of them for how long it took. And Ctrl-C works, also in a
run that was begun in the background: a shell has such processes ignore it, and what they start inherits that.
"""

import signal

from hypothesis import HealthCheck, settings

signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "agentrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("agentrl")

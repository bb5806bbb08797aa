"""Hypothesis asks for the same examples in each run, and none of them for how long it took."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "agentrl", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.load_profile("agentrl")

"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# How long an example takes depends on the machine's load, so no test fails for it.
settings.register_profile(
    "kvtier", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("kvtier")

"""For all unit tests."""

from __future__ import annotations

from hypothesis import settings

# The same examples each time: what a run finds, the next one finds again.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")

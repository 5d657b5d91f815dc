"""Shared fixtures; how hard hypothesis looks (``--hypothesis-profile=thorough`` looks longer)."""

from __future__ import annotations

import os

os.environ.setdefault("PJRT_DEVICE", "CPU")

from hypothesis import HealthCheck, settings

settings.register_profile("fast", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("fast")

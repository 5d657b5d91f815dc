"""A sample of `make crash-objects`."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.crash
def test_faults_at_requests_of_saves() -> None:
    command = [sys.executable, "-m", "tests.buckets.crash", "--faults", "5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert '"faults": 5, "problems": {}' in done.stdout

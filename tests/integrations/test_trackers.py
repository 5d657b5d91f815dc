"""docs/trackers.md: each tracker that is installed gets what its section gives it."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from tests.nursery import Program, bear
from tests.runs import ROOT, environment
from tests.test_documents import BLOCK

BEGIN, *SECTIONS = re.split(r"^## ", (ROOT / "docs/trackers.md").read_text(), flags=re.MULTILINE)
BLOCKS = {section.split("\n")[0]: "\n".join(BLOCK.findall(section)) for section in SECTIONS}
RUN = BLOCKS.pop("A run")

SEEN = {
    "TensorBoard": """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
board.close()
events = EventAccumulator("board").Reload()
assert [event.step for event in events.Scalars("save/seconds")] == [1, 2, 3]
assert [event.value for event in events.Scalars("load/failed")] == [0.0, 1.0]
assert {"save/write_seconds", "load/read_seconds"} <= {*events.Tags()["scalars"]}
""",
    "Weights & Biases": """
assert run.summary["save/bytes"] == 4 * 512 * 513 and run.summary["load/failed"] == 1.0
assert run.summary["save/write_seconds"] > 0 and run.summary["checkpoint"] == 9
run.finish()
""",
    "MLflow": """
told = client.get_metric_history(run.info.run_id, "save/seconds")
assert sorted(metric.step for metric in told) == [1, 2, 3] and all(metric.value > 0 for metric in told)
assert client.get_run(run.info.run_id).data.metrics["load/failed"] == 1.0
""",
    "Prometheus": """
from prometheus_client import REGISTRY
calls = {(kind, outcome): REGISTRY.get_sample_value("checkpoint_calls_total", {"kind": kind, "outcome": outcome})
         for kind, outcome in (("save", "ok"), ("load", "ok"), ("load", "NoCheckpointError"))}
assert list(calls.values()) == [3.0, 1.0, 1.0], calls
assert REGISTRY.get_sample_value("checkpoint_last", {"name": "save/bytes"}) == 4 * 512 * 513
""",
}
PACKAGES = {
    "TensorBoard": "tensorboard", "Weights & Biases": "wandb", "MLflow": "mlflow", "Prometheus": "prometheus_client",
}  # fmt: skip


def test_each_section_is_run() -> None:
    assert set(BLOCKS) == set(SEEN) == set(PACKAGES)


def test_a_hook_takes_ten_lines() -> None:
    for block in BLOCKS.values():
        assert sum(bool(line.strip()) for line in block.splitlines()) <= 10


@pytest.mark.parametrize("section", [*SEEN])
def test_the_tracker_has_the_numbers(section: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(PACKAGES[section]) is None:
        pytest.skip(f"{PACKAGES[section]} is not installed")
    find = f"import sys; sys.path[:] = {sys.path!r}"  # a nursery was begun with its own
    program = "\n".join([find, *BLOCK.findall(BEGIN), BLOCKS[section], RUN, SEEN[section]])
    offline = {
        "WANDB_MODE": "offline",
        "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
    }
    born = bear(Program(program, name="trackers.py"), cwd=tmp_path, env=environment(offline))
    _, errors = born.communicate(240)
    assert born.returncode == 0, errors

"""Each save and load as metrics of Prometheus.

    pip install prometheus-client
    python examples/report_prometheus.py --root /tmp/run --steps 4

A training program would call `start_http_server(9100)`, and Prometheus would fetch the metrics; this one prints them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from prometheus_client import Counter, Gauge, Histogram, generate_latest

import xla_ckpt

CALLS = Counter("xla_ckpt_calls", "Saves and loads", ["kind", "outcome"])
BYTES = Counter("xla_ckpt_bytes", "Array bytes that were saved or loaded", ["kind"])
SECONDS = Histogram("xla_ckpt_seconds", "Time of a save or load", ["kind"], buckets=(0.1, 1, 10, 60, 300, 1800))
STALL = Gauge("xla_ckpt_stall_seconds", "Time for which the caller of the last save waited")
PHASE = Counter("xla_ckpt_phase_seconds", "Time of the phases", ["kind", "phase"])


def count(report: xla_ckpt.SaveReport | xla_ckpt.LoadReport) -> None:
    saved = isinstance(report, xla_ckpt.SaveReport)
    kind, nbytes = ("save", report.nbytes) if saved else ("load", report.needed_bytes)
    CALLS.labels(kind, type(report.error).__name__ if report.error else "ok").inc()
    BYTES.labels(kind).inc(nbytes)
    SECONDS.labels(kind).observe(report.seconds)
    if saved:
        STALL.set(report.stall)
    for name, phase in report.phases.items():
        PHASE.labels(kind, name).inc(max(phase.seconds, 0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="where the tags go")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    xla_ckpt.on_report(count)
    model = torch.nn.Linear(512, 512)
    for step in range(1, args.steps + 1):
        xla_ckpt.save_checkpoint(args.root, f"step_{step}", model, async_save=True, num_kept_ckpts=2)
    xla_ckpt.load_checkpoint(args.root, model=model)
    try:
        xla_ckpt.load_checkpoint(args.root, "step_0", model=model)
    except xla_ckpt.NoCheckpointError:
        pass  # counted, as every call that fails
    print(generate_latest().decode())


if __name__ == "__main__":
    main()

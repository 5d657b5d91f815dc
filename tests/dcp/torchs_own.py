"""torch's own tests of torch.distributed.checkpoint, once with stock DCP and once with `xla_ckpt.dcp`, on CPUs.

    python -m tests.dcp.torchs_own pytorch/test/distributed/checkpoint [-- arguments of pytest]

The tests are in torch's sources, and not in this repository. Those that use DCP's calls are copied, with gloo in the
place of nccl and CPUs in the place of GPUs, and in the second run with this library's names in the place of DCP's, as
far as it has them. Many need what a machine without GPUs does not have: those that stock DCP passes are the judge. They
need the package `expecttest`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ON_CPUS = (
    (r"^ *@(skip_if_lt_x_gpu\(.*\)|requires_nccl\(\))\n", ""),
    (r"cpu:gloo,cuda:nccl|\bnccl\b", "gloo"),
    (r"/cuda:(\d|\{\w+\})", "/cpu"),
    (r"cuda:(\d|\{dist\.get_rank\(\)\})", "cpu"),
    (r"\.cuda\([^()]*(\(\))?\)", ".cpu()"),
    (r"torch\.cuda\.device_count\(\)", "4"),
    (r"\"cuda\"", '"cpu"'),
    (r"with_comms\(init_rpc=False\)", 'with_comms(init_rpc=False, backend="gloo")'),
)
"""What makes a test of several GPUs one of several processes."""

SWAPPED = (
    (r"^(\s*)import torch\.distributed\.checkpoint as", r"\1import swapped as"),
    (r"^(\s*)from torch\.distributed\.checkpoint import", r"\1from swapped import"),
    (r"^(\s*)import torch\.distributed\.checkpoint\.state_dict_saver as", r"\1import swapped as"),
)
"""What has the tests take names from `swapped`, which is `SHIM`."""

SHIM = """
import torch.distributed.checkpoint as stock, xla_ckpt.dcp as ours

def __getattr__(name):
    return getattr(ours if name in ours.__all__ else stock, name)
"""

CONFTEST = """
import torch, torch.distributed.fsdp
from torch.testing._internal.common_distributed import MultiProcessTestCase
fork = torch.multiprocessing.get_context("fork").Process
MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
torch.set_num_threads(1)
# Without a device, FSDP1 looks for an accelerator.
init = torch.distributed.fsdp.FullyShardedDataParallel.__init__
torch.distributed.fsdp.FullyShardedDataParallel.__init__ = lambda self, *arguments, **options: init(
    self, *arguments, **{"device_id": torch.device("cpu"), **options})
"""
"""Forked processes begin at once; spawned ones import torch anew."""


def outcomes(sources: Path, folder: Path, *, swapped: bool, arguments: list[str]) -> dict[str, str]:
    """Run the tests; what became of each: ``passed``, or why not."""
    for path in sources.rglob("test_*.py"):
        text = path.read_text()
        if not any(re.search(name, text, re.MULTILINE) for name, _ in SWAPPED):
            continue
        for pattern, by in (*ON_CPUS, *(SWAPPED if swapped else ())):
            text = re.sub(pattern, by, text, flags=re.MULTILINE)
        (folder / path.name).write_text(text)
    (folder / "swapped.py").write_text(SHIM)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    report = folder / "report.xml"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "300"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), *map(os.path.abspath, sys.path)])
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments],
        cwd=folder, env=environment, check=False,
    )  # fmt: skip
    made = {}
    for case in ET.parse(report).iter("testcase"):
        failure = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        why = "passed" if failure is None else str(failure.get("message")).strip()
        made[f"{case.get('classname')}.{case.get('name')}"] = why
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", type=Path)
    parser.add_argument("arguments", nargs="*", help="of pytest")
    given = parser.parse_args()
    runs = []
    for swapped in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(outcomes(given.sources, Path(folder), swapped=swapped, arguments=given.arguments))
    stock, ours = runs
    judges = [name for name, how in stock.items() if how == "passed"]
    refused = [name for name in judges if ours[name] != "passed"]
    for name in refused:
        print(f"{name}: {ours[name][-400:]}")
    passed = len(judges) - len(refused)
    print(f"{len(stock)} tests; stock DCP passes {len(judges)}; xla_ckpt.dcp passes {passed} of these")


if __name__ == "__main__":
    main()

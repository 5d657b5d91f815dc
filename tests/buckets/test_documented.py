"""The python blocks of docs/object-stores.md run, on a bucket and a disk of the test's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.buckets.s3_server import S3Server
from tests.runs import ROOT
from tests.test_documents import program_of

BEFORE = """
import torch
model = torch.nn.Linear(3, 3)
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(3)).sum().backward()
optimizer.step()
"""

AFTER = """
assert xla_ckpt.list_tags(f"s3://{BUCKET}/run") == ["step_100"]
assert xla_ckpt.verify(f"s3://{BUCKET}/runs/7b").ok
"""


def test_python_blocks_run(s3: S3Server, tmp_path: Path) -> None:
    bucket = s3.new_bucket()
    blocks = program_of(ROOT / "docs/object-stores.md")
    blocks = blocks.replace("s3://bucket", f"s3://{bucket}").replace("/nvme/run", str(tmp_path / "nvme"))
    program = f"BUCKET = {bucket!r}\n{BEFORE}\n{blocks}\n{AFTER}"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, **s3.environment}, cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

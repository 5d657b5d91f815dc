"""The process from which jobs of the real neuronx-distributed are forked: `run_on_nxd` of tests/neuron/real_nxd.py.

It reads one job from each line of its input, and answers with one line. What it imports lies in the folder that
NXD_REAL names, and so is imported only when it runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def main() -> None:
    """Carry out all jobs, until there is no more input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    import nxdjob  # which imports neuronx-distributed

    import neuron_compat.nxd  # noqa: F401  # and xla_ckpt, so that no rank has to

    for line in sys.stdin:
        module, function, world, args, timeout = json.loads(line)
        importlib.import_module(module)
        answers.write(json.dumps(nxdjob.run(world, _as_rank, module, function, args, timeout=timeout)) + "\n")
        answers.flush()


def _as_rank(rank: int, world: int, meeting: str, module: str, function: str, args: list[Any]) -> dict[str, Any]:
    """A rank's part of a job."""
    import nxd_env

    nxd_env.patch_runtime(rank, world, meeting)
    return {"value": getattr(sys.modules[module], function)(rank, *args)}


if __name__ == "__main__":
    main()

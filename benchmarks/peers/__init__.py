"""Our saves and loads beside the peers', in one interleaved run: `make bench`.

    python -m benchmarks.peers [--gb 1] [--rounds 5] [--only save,cold] [--short] [--write | --check]

Every measurement is a fresh process; the contenders take turns, so that a noisy minute hits all of them.

| module | what is in it |
|---|---|
| `contenders` | the table: every group, and every row of it |
| `states`, `machine` | what is saved and loaded; the machine: its caches, its quiet, a process's peak of memory |
| `saves`, `loads` | each contender's call |
| `measures` | what a measuring process does: one function for each kind of measurement |
| `running` | the rounds: fresh processes, time limits, and rows that fail |
| `results`, `targets` | medians, ratios, what was promised, and the comparison with the committed numbers: all pure |
| `render`, `plots` | docs/performance.md and its pictures |
"""

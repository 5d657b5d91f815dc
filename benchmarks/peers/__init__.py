"""Our saves and loads beside the peers', in one interleaved run: `make bench`.

    python -m benchmarks.peers [--gb 1] [--rounds 3] [--only save,cold] [--short] [--write | --check]

Every measurement is a fresh process; the contenders take turns, so that a noisy minute hits all of them.

| module | what is in it |
|---|---|
| `contenders`, `on_cpus` | the table: every group, and every row of it; those of CPU tensors apart |
| `buckets`, `bucket_calls` | the groups about an object store, and how they are measured; each contender's calls |
| `rows`, `notes` | what a group and a row are; what makes the rows comparable, in words |
| `states`, `machine` | what is saved and loaded; the machine: its caches, its quiet, a process's peak of memory |
| `saves`, `loads`, `installed` | each contender's call; the packages that `make bench` installs for them |
| `measures` | what a measuring process does: one function for each kind of measurement |
| `running` | the rounds: fresh processes, time limits, and rows that fail |
| `results`, `figures` | what was measured; a figure or a ratio that is read off it: pure, as are the next two |
| `targets`, `check` | what was promised, a line each; the comparison with the committed numbers |
| `render`, `plots` | docs/measured/performance.md and its pictures |
"""

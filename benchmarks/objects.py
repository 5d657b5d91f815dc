"""Saves and loads of an object store, against the bare client and boto3 on the same server.

    python benchmarks/objects.py [--megabytes N] [--rounds N]

The server is benchmarks/sink_s3.py in a process of its own, on this machine: what is measured is the client's side. All
rows move the same bytes, in files of the same sizes and parts of the same size. Rounds alternate; a row has the least
time of its rounds, and the ratio of its rate to that of bare obstore.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ARRAYS = 16
SHARE = 4
"""Of so many arrays a partial load reads one."""


def start_server() -> tuple[subprocess.Popen[str], str]:
    """The server and its address."""
    command = [sys.executable, str(Path(__file__).with_name("sink_s3.py")), "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, f"http://127.0.0.1:{int(server.stdout.readline())}"


def side_by_side(works: list[Callable[[], Any]]) -> None:
    """Do everything at once, in a thread each."""
    with ThreadPoolExecutor(max(len(works), 1)) as pool:
        for future in [pool.submit(work) for work in works]:
            future.result()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    server, url = start_server()
    os.environ.update(AWS_ENDPOINT_URL=url, AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_REGION="us-east-1")
    try:
        measure(url, args.megabytes * 1_000_000, args.rounds)
    finally:
        server.kill()
        server.wait()


def measure(url: str, nbytes: int, rounds: int) -> None:
    import boto3
    import obstore
    import torch
    from boto3.s3.transfer import TransferConfig

    import xla_ckpt
    from xla_ckpt.storage.door import store_at
    from xla_ckpt.storage.remote import COSTS, PARTS_AT_ONCE, part_bytes
    from xla_ckpt.tags.roots import root_of

    root, state = "s3://bucket/run", {}
    for number in range(ARRAYS):
        state[f"w{number:02}"] = torch.full((nbytes // ARRAYS // 4,), float(number))
    wanted = dict(list(state.items())[::SHARE])
    xla_ckpt.save(root, "a", state, num_kept_ckpts=1)
    directory = root_of(store_at(root)).open("a")
    sizes = [directory.open(path).size for path in directory.files() if path.endswith(".safetensors")]
    bare: Any = obstore.store.S3Store("bucket", endpoint=url, client_options={"allow_http": True})
    client = boto3.client("s3", endpoint_url=url)
    source = memoryview(bytes(max(sizes)))
    config = TransferConfig(multipart_chunksize=part_bytes(max(sizes)), multipart_threshold=part_bytes(max(sizes)))
    counter = iter(range(10_000))

    def save() -> None:
        state["w00"].add_(1)  # a state that is saved again has gone on
        xla_ckpt.save(root, f"t{next(counter)}", state, num_kept_ckpts=1)

    def bare_put() -> None:
        def one(number: int) -> None:
            part = part_bytes(sizes[number])
            parts = (bytes(source[at : at + part]) for at in range(0, sizes[number], part))
            bare.put(f"bare/{number}", parts, chunk_size=part, max_concurrency=PARTS_AT_ONCE)

        side_by_side([lambda n=n: one(n) for n in range(len(sizes))])

    def bare_get(share: int = 1) -> None:
        ranges = [(n, at) for n, size in enumerate(sizes) for at in range(0, size // share, COSTS.batch_bytes)]
        memory = [bytearray(size // share) for size in sizes]
        lock, left = threading.Lock(), iter(ranges)

        def work() -> None:
            while True:
                with lock:
                    found = next(left, None)
                if found is None:
                    return
                number, at = found
                end = min(at + COSTS.batch_bytes, len(memory[number]))
                memory[number][at:end] = memoryview(bare.get_range(f"bare/{number}", start=at, end=end))

        side_by_side([work] * COSTS.in_flight)

    def boto_put() -> None:
        works = [
            lambda n=n: client.upload_fileobj(io.BytesIO(source[: sizes[n]]), "bucket", f"boto/{n}", Config=config)
            for n in range(len(sizes))
        ]
        side_by_side(works)

    def boto_get() -> None:
        works = [
            lambda n=n: client.download_fileobj("bucket", f"boto/{n}", io.BytesIO(), Config=config)
            for n in range(len(sizes))
        ]
        side_by_side(works)

    rows: list[tuple[str, int, Callable[[], Any]]] = [
        ("obstore, put", 1, bare_put),
        ("save", 1, save),
        ("boto3, upload_fileobj", 1, boto_put),
        ("obstore, get_range", 1, bare_get),
        ("restore", 1, lambda: xla_ckpt.restore(root)),
        ("boto3, download_fileobj", 1, boto_get),
        (f"obstore, get_range of 1/{SHARE}", SHARE, lambda: bare_get(SHARE)),
        (f"restore of 1/{SHARE} of the arrays", SHARE, lambda: xla_ckpt.restore(root, like=wanted)),
    ]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name, _, _ in rows}
    for _ in range(rounds + 1):  # the first one opens connections, and does not count
        for name, _, work in rows:
            clock, cpu = time.perf_counter(), time.process_time()
            work()
            times[name].append((time.perf_counter() - clock, time.process_time() - cpu))
            xla_ckpt.finalize_checkpoint()
    print(f"{sum(sizes) / 1e6:.0f} MB in {len(sizes)} files, {rounds} rounds\n")
    print("| | MB/s | of bare obstore | CPU, s/GB |\n|---|---|---|---|")
    base = 1.0
    for name, share, _ in rows:
        moved = sum(sizes) / share
        seconds = min(clock for clock, _ in times[name][1:])
        if name.startswith("obstore"):
            base = seconds
        cpu = min(cpu for _, cpu in times[name][1:])
        print(f"| {name} | {moved / seconds / 1e6:.0f} | {base / seconds:.2f} | {cpu / moved * 1e9:.2f} |")


if __name__ == "__main__":
    main()

"""Train a small byte-level model in jax, on all devices that there are, and survive anything. torch is not needed.

The state is one tree: parameters and Adam's moments over a mesh of devices, and a typed key from which each step draws
its excerpts and its dropout. A state of flax (`nnx.state`, a `TrainState`) or optax goes in its place as it is. Each
step donates the state to the next one, also while a save still writes it. Started again, the run goes on from the
latest tag, bit for bit, on whatever devices there are now.

    python examples/jax_train.py --root runs/jax                       # train, or go on
    python examples/kill_and_resume.py --program jax_train.py          # kill -9 in mid-save, and go on
"""

from __future__ import annotations

import argparse
import functools
import json
import sysconfig
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import xla_ckpt

CONTEXT, WIDTH, LAYERS, BATCH = 32, 512, 4, 16
DROPOUT, RATE = 0.1, 1e-3


def text() -> jax.Array:
    """Source code of the standard library: real text, on every machine."""
    library = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join(path.read_bytes() for path in sorted(library.glob("a*.py")))
    return jnp.frombuffer(content, jnp.uint8)


def beginning(seed: int) -> dict[str, Any]:
    """The state before the first step."""
    key, embed, head, *layers = jax.random.split(jax.random.key(seed), LAYERS + 3)
    params = {
        "embed": 0.1 * jax.random.normal(embed, (256, WIDTH // 8)),
        "first": 0.02 * jax.random.normal(head, (CONTEXT * WIDTH // 8, WIDTH)),
        "layers": [0.02 * jax.random.normal(each, (WIDTH, WIDTH)) for each in layers],
        "head": jnp.zeros((WIDTH, 256)),
    }
    # Arrays of their own for each: one buffer cannot be donated twice.
    mean, square = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    return {"params": params, "mean": mean, "square": square, "key": key, "step": jnp.int32(0)}


def on_devices(shapes: Any) -> Any:
    """Where each array of the state lies: matrices are split over all devices by their rows, the rest is copied."""
    mesh = Mesh(np.array(jax.devices()), ("model",))
    return jax.tree.map(lambda leaf: NamedSharding(mesh, PartitionSpec(*("model",) * (leaf.ndim == 2))), shapes)


def loss_of(params: Any, rows: jax.Array, key: jax.Array) -> jax.Array:
    """The mean loss of the last byte of each row, given the bytes before it."""
    x = params["embed"][rows[:, :-1]].reshape(BATCH, -1) @ params["first"]
    for layer, own in zip(params["layers"], jax.random.split(key, LAYERS), strict=True):
        kept = jax.random.bernoulli(own, 1 - DROPOUT, x.shape)
        x = x + jnp.where(kept, jax.nn.gelu(x @ layer), 0) / (1 - DROPOUT)
    chances = jax.nn.log_softmax(x @ params["head"])
    return -jnp.take_along_axis(chances, rows[:, -1:].astype(jnp.int32), axis=1).mean()


@functools.partial(jax.jit, donate_argnums=0)
def train_step(state: dict[str, Any], data: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """One step of Adam; the state and the loss after it."""
    key, excerpts, dropout = jax.random.split(state["key"], 3)
    starts = jax.random.randint(excerpts, (BATCH, 1), 0, len(data) - CONTEXT - 1)
    loss, slope = jax.value_and_grad(loss_of)(state["params"], data[starts + jnp.arange(CONTEXT + 1)], dropout)
    step = state["step"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], slope)
    square = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, state["square"], slope)
    rate = RATE * jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    moved = jax.tree.map(lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8), state["params"], mean, square)
    return {"params": moved, "mean": mean, "square": square, "key": key, "step": step}, loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", default="runs/jax", help="where checkpoints go: a directory, or s3://bucket/path")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="append one JSON line a step")
    args = parser.parse_args()

    shapes = jax.eval_shape(beginning, args.seed)
    places = on_devices(shapes)
    if xla_ckpt.has_checkpoint(args.root):
        wanted = jax.tree.map(lambda s, at: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=at), shapes, places)
        restored = xla_ckpt.restore(args.root, like=wanted)
        state, report = restored.tree, restored.report
        print(f"resumed from {report.tag}: {report.arrays} arrays in {report.seconds:.2f} s", flush=True)
    else:
        state = jax.device_put(beginning(args.seed), places)

    data, step = text(), int(state["step"])
    while step < args.steps:
        state, loss = train_step(state, data)
        step += 1
        line: dict[str, Any] = {"step": step, "loss": float(loss).hex()}
        if step % args.save_every == 0:
            began = time.perf_counter()
            xla_ckpt.save(args.root, f"step_{step}", state, num_kept_ckpts=3, async_save=True)
            line["stall_ms"] = 1000 * (time.perf_counter() - began)
        stall = f"  save of step_{step} begun in {line['stall_ms']:.1f} ms" if "stall_ms" in line else ""
        print(f"step {step:4d}  loss {float(loss):.6f}{stall}", flush=True)
        if args.log:
            with args.log.open("a") as log:
                log.write(json.dumps(line) + "\n")
    xla_ckpt.finalize_checkpoint()


if __name__ == "__main__":
    main()

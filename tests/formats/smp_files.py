"""SageMaker model parallel's files, made by hand with plain torch.save, as PEERS describes them. No code of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.runs import names_in
from tests.topology.state import GROUPS, WHOLE, known, names_of, tp_part, whole
from xla_ckpt import Mesh

GENERATIONS: dict[str, Callable[[str, int, int, int], str]] = {
    "1.12": lambda f, pp, tp, rdp: f"{f}_{pp}_{tp}.pt",
    "documents": lambda f, pp, tp, rdp: f"{f}_{pp}_{tp}",
    "1.6": lambda f, pp, tp, rdp: f"{f}_{pp}",
    "v3": lambda f, pp, tp, rdp: f"{f}_{pp}_{tp}_{rdp}.pt",
}
"""Which version -> name of the part of a rank."""


def load_info(pp: int, tp: int, **more: Any) -> dict[str, Any]:
    return {
        "tensor_parallel_degree": tp, "pipeline_parallel_degree": pp, "partition_info": {"main": 0, "main/embed": 0},
        **more,
    }  # fmt: skip


ORDER = [n for n in WHOLE if "norm" not in n and "scale" not in n] + [n for n in WHOLE if "norm" in n or "scale" in n]
"""The parameters of tests.topology.state's optimizer in the order of its groups: SMP numbers them over all stages."""


def cut(full: torch.Tensor, name: str, tp: int, i: int) -> torch.Tensor:
    """What a tp rank has of a value. Where SMP cannot cut evenly, the first ranks have one more than the others."""
    _, dim, stride = WHOLE[name]
    if dim is None or full.shape[dim] % (tp * stride) == 0:
        return tp_part(full, name, tp, i)
    sizes = [full.shape[dim] // tp + (rank < full.shape[dim] % tp) for rank in range(tp)]
    return full.narrow(dim, sum(sizes[:i]), sizes[i]).clone()


Cut = Callable[[torch.Tensor, str, int, int], torch.Tensor]


def toy_model(mesh: Mesh, pp: int, tp: int, cut: Cut = cut, **info: Any) -> dict[str, Any]:
    """What `local_state_dict` returns on a rank."""
    rank = mesh.rank({"pp": pp, "tp": tp})
    held: dict[str, Any] = {n: cut(whole(n), n, mesh.tp, tp) for n in names_of(mesh, rank)}
    # On each stage a module of the toy has this buffer; SMP would have it once.
    held |= {"seen": torch.tensor(5.0)} if pp == 0 else {}
    return {**held, "_smp_is_partial": True, "_smp_load_info": load_info(mesh.pp, mesh.tp, **info)}


def toy_groups() -> list[dict[str, Any]]:
    options = {"betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    first = sum("norm" not in n and "scale" not in n for n in WHOLE)
    numbers = (list(range(first)), list(range(first, len(ORDER))))
    return [{**options, **own, "params": some} for own, some in zip(GROUPS, numbers, strict=True)]


def toy_state(mesh: Mesh, tp: int, name: str, cut: Cut = cut) -> dict[str, Any]:
    parts = {w: cut(known(name, w), name, mesh.tp, tp) for w in ("exp_avg", "exp_avg_sq")}
    return {"step": torch.tensor(7.0), **parts}


def toy_optimizer(
    mesh: Mesh, pp: int, tp: int, *, keep: Callable[[int], bool] = lambda _: True, cut: Cut = cut
) -> dict[str, Any]:
    """What the optimizer's `local_state_dict` returns: on tp ranks above 0 it is empty for what is not split."""
    mine = names_of(mesh, mesh.rank({"pp": pp, "tp": tp}))
    state = {
        i: {} if tp and WHOLE[n][1] is None else toy_state(mesh, tp, n, cut)
        for i, n in enumerate(ORDER) if n in mine and keep(i)
    }  # fmt: skip
    return {"state": state, "param_groups": toy_groups(), "_smp_is_partial": True}


def write_set(
    prefix: Path, mesh: Mesh, generation: str, content: Callable[[int, int], Mapping[str, Any]] | None = None
) -> list[Path]:
    """A set of files of the toy: the model, the optimizer, and a number of the program's own."""
    made = []
    for pp in range(mesh.pp):
        for tp in range(mesh.tp):
            held = content(pp, tp) if content is not None else toy_content(mesh, pp, tp)
            for rdp in range(mesh.dp if generation == "v3" else 1):
                made.append(Path(GENERATIONS[generation](str(prefix), pp, tp, rdp)))
                torch.save(held, made[-1])
    return made


def toy_content(mesh: Mesh, pp: int, tp: int) -> dict[str, Any]:
    return {
        "model_state_dict": toy_model(mesh, pp, tp), "optimizer_state_dict": toy_optimizer(mesh, pp, tp), "epoch": 3,
    }  # fmt: skip


def described_content(mesh: Mesh, pp: int, tp: int) -> dict[str, Any]:
    """The same with what this library adds: how parameters are split, and which name a number stands for."""
    mine = names_of(mesh, mesh.rank({"pp": pp, "tp": tp}))
    specs = {
        name: None if dim is None else (*(None,) * dim, ("tp", stride) if stride > 1 else "tp")
        for name, (_, dim, stride) in WHOLE.items() if name in mine
    }  # fmt: skip
    optimizer = toy_optimizer(mesh, pp, tp, cut=tp_part)
    for group in optimizer["param_groups"]:
        group["param_names"] = [ORDER[n] for n in group["params"]]
    ours = {"specs": specs, "shapes": {name: WHOLE[name][0] for name in mine}}
    return {"model": toy_model(mesh, pp, tp, cut=tp_part, xla_ckpt=ours), "optimizer": optimizer, "epoch": 3}


def write_tag(root: Path, tag: str, mesh: Mesh, *, ended: bool = True, user_content: Any = None) -> Path:
    """What `smp.save_checkpoint(root, tag)` leaves."""
    folder = root / f"{tag}_partial"
    folder.mkdir(parents=True)
    for pp in range(mesh.pp):
        for tp in range(mesh.tp):
            torch.save(toy_model(mesh, pp, tp), folder / f"model_{pp}_{tp}.pt")
            torch.save(toy_optimizer(mesh, pp, tp), folder / f"optimizer_states_{pp}_{tp}.pt")
    if user_content is not None:
        torch.save(user_content, folder / "user_content.pt")
    if ended:
        config = {"tensor_parallel_degree": mesh.tp, "pipeline_parallel_degree": mesh.pp, "smp_version": "1.12.1"}
        torch.save(config, folder / "smp_config.pt")
        with (root / "newest").open("a") as newest:
            newest.write(f"{tag}_partial\n")
    return folder


def flip(path: Path, needle: bytes) -> None:
    """Change one bit in the bytes of a file that begin with `needle`."""
    data = bytearray(path.read_bytes())
    at = data.index(needle)
    data[at] ^= 1
    path.write_bytes(data)


def all_of(folder: Path) -> Iterable[str]:
    return names_in(folder)

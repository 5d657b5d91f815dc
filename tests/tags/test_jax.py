"""Which platforms jax has after a save: orbax asks it which process this is, and jax opens what it may to answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runs import run

SAVE = """
    import sys
    import torch
    {imports}
    import xla_ckpt
    assert ("jax" in sys.modules) == {jax}
    xla_ckpt.save_checkpoint(sys.argv[1], "a", model={{"w": torch.ones(3)}})
    import jax
    print(repr(jax.config.jax_platforms), jax.default_backend())
"""


@pytest.mark.parametrize("beside", ["", pytest.param(", torch_xla", marks=pytest.mark.xla)])
def test_a_program_that_uses_jax_itself_keeps_its_platforms(beside: str, tmp_path: Path) -> None:
    """Also beside torch_xla: forced onto the CPU, the program's own computations would silently run there."""
    code = SAVE.format(imports=f"import jax{beside}; jax.config.update('jax_platforms', '')", jax=True)
    assert run(code, tmp_path).stdout.split()[0] == "''"


@pytest.mark.parametrize("imports", ["", pytest.param("import torch_xla", marks=pytest.mark.xla)])
def test_any_other_program_keeps_its_accelerator_for_torch_xla(imports: str, tmp_path: Path) -> None:
    """Also where the environment of the machine names platforms: jax would fail here if it opened this one."""
    code = SAVE.format(imports=imports, jax=False)
    assert run(code, tmp_path, env={"JAX_PLATFORMS": "tpu"}).stdout.split() == ["'cpu'", "cpu"]

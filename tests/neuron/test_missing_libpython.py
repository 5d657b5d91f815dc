"""Where Python's shared library is missing, the error of torch_xla's first import says what to install."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from neuron_compat.lazy_imports import import_module


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a compiler of C")
def test_an_import_without_libpython_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, source = tmp_path / "libpython3.99.so.1.0", tmp_path / "empty.c"
    source.write_text("")
    module = tmp_path / f"needs_libpython{sysconfig.get_config_var('EXT_SUFFIX')}"
    build = ["cc", "-shared", "-fPIC"]
    subprocess.run([*build, f"-Wl,-soname,{library.name}", "-o", library, source], check=True)
    subprocess.run([*build, "-Wl,--no-as-needed", "-o", module, source, library], check=True)
    library.unlink()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ImportError, match=r"libpython3\.99\.so\.1\.0") as caught:
        import_module("needs_libpython")
    assert "apt install libpython" in "".join(caught.value.__notes__)


def test_another_import_error_stays_as_it_is() -> None:
    with pytest.raises(ImportError, match="no_such_module") as caught:
        import_module("no_such_module")
    assert not hasattr(caught.value, "__notes__")

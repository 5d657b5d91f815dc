"""House rules that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors

from tests.runs import ROOT, environment
from xla_ckpt.formats.registry import list_layouts

HOMES_OF_PATHS = ("xla_ckpt/core/tree/schema.py", "xla_ckpt/core/tree/optimizer_schema.py")
PATHS_OF_THE_STATE = re.compile(
    r"^(model|optimizer|scheduler|extras|user_content)/|^optimizer/param_groups|(^|/)(state|master|ranks)/"
    r"|exp_avg|momentum_buffer"
)

SOURCES = sorted(p for package in ("xla_ckpt", "neuron_compat") for p in (ROOT / package).rglob("*.py"))
LIBRARY = [p for p in SOURCES if p.is_relative_to(ROOT / "xla_ckpt")]
ABOUT_IT = [ROOT / "xla_ckpt/formats" / name for name in ("nxd", "optimum", "smp")]
"""What is about the files of neuronx-distributed, of optimum-neuron, which has the same, and of SageMaker's library."""

FRAMEWORKS = re.compile(r"\b(torch|torch_xla|jax|orbax|numpy|tensorstore)\b")


def imported(code: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}


def test_import_is_cheap() -> None:
    modules = imported("import xla_ckpt, neuron_compat")
    assert "xla_ckpt" in modules
    assert not [m for m in modules if FRAMEWORKS.match(m)]


def test_listing_tags_needs_no_framework() -> None:
    modules = imported("import xla_ckpt; xla_ckpt.list_tags('/nowhere'); xla_ckpt.has_checkpoint('/nowhere')")
    assert not {m for m in modules if re.match(r"(torch|torch_xla|jax|orbax)\b", m)}


@pytest.mark.parametrize("program_has_torch", [False, True])
def test_the_names_that_take_objects_load_no_framework(*, program_has_torch: bool) -> None:
    modules = imported(
        f"import {'torch, ' * program_has_torch}xla_ckpt\n"
        "xla_ckpt.save_checkpoint, xla_ckpt.restore, xla_ckpt.RNGState, xla_ckpt.ArraySpec"
    )
    assert ("torch" in modules) == program_has_torch
    assert ("xla_ckpt.state.model_view" in modules) == program_has_torch, "the first save is not to pay for it"
    assert not {m for m in modules if re.match(r"(torch_xla|jax|orbax)\b", m)}


def test_files_are_named_for_something() -> None:
    foreign = ROOT / "neuron_compat/nxd/parallel_layers/utils.py"  # neuronx-distributed's name
    empty = ("utils", "common", "helpers", "misc", "types")
    assert [path for path in SOURCES if path.stem in empty and path != foreign] == []


def strings(path: Path) -> set[str]:
    """The strings of a module that are no documentation."""
    tree = ast.parse(path.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
    }


def test_paths_of_the_state_are_spelled_in_one_place() -> None:
    """A path that is spelled twice is changed once. (A text of several lines is for people, and may show one.)"""
    homes, others = set(), {}
    for path in LIBRARY:
        spelled = {text for text in strings(path) if "\n" not in text and PATHS_OF_THE_STATE.search(text)}
        if str(path.relative_to(ROOT)) in HOMES_OF_PATHS:
            homes |= spelled
        elif spelled and not any(path.is_relative_to(folder) for folder in ABOUT_IT):  # whose files have such folders
            others[str(path.relative_to(ROOT))] = spelled
    assert "exp_avg" in homes
    assert others == {}


def test_every_public_name_is_documented() -> None:
    import xla_ckpt

    for name in xla_ckpt.__all__:
        value = getattr(xla_ckpt, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name
    assert set(xla_ckpt.__all__) <= set(dir(xla_ckpt))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = xla_ckpt.nonsense


def test_no_download_addresses_are_committed() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout: what is committed is unknown")
    assert not [name for name in tracked if name.endswith(("uv.lock", "pylock.toml"))]
    for pins in ("requirements-dev.txt", "requirements-latest.txt", "requirements-docs.txt"):
        assert "http" not in (ROOT / pins).read_text(), pins


def code_of(path: Path) -> Iterator[ast.AST]:
    """The nodes of a module, without its docstrings."""
    tree = ast.parse(path.read_text())
    texts = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    return (node for node in ast.walk(tree) if id(node) not in texts)


def words_of(node: ast.AST) -> Iterator[str]:
    """The names and texts in a node itself."""
    for field in ("id", "attr", "arg", "name", "module", "asname", "value"):
        if isinstance(word := getattr(node, field, None), str):
            yield word


KNOW_NO_LAYOUT = (
    "arrays", "core/files", "core/manifest", "core/sharding", "core/tree", "loading", "saving", "snapshot", "storage",
    "tags",
)  # fmt: skip


def test_only_what_has_to_do_with_layouts_knows_neuronx_distributed() -> None:
    named = {
        str(path.relative_to(ROOT / "xla_ckpt"))
        for path in LIBRARY
        if any(path.is_relative_to(ROOT / "xla_ckpt" / folder) for folder in KNOW_NO_LAYOUT)
        for node in code_of(path)
        if any(re.search(r"nxd|neuronx|xser", word, re.IGNORECASE) for word in words_of(node))
    }
    assert named == {"saving/request.py", "saving/save.py"}, "where the argument use_xser is"


def test_what_layouts_of_rank_files_share_names_no_program() -> None:
    """Who adds a layout of rank files is to read no other program's rules first: not even in comments."""
    of_programs = re.compile(r"nxd|neuronx|xser|sagemaker|smp|optimum|megatron|LoraModel|trn\d", re.IGNORECASE)
    shared = (ROOT / "xla_ckpt/formats/rank_files").glob("*.py")
    assert [line for path in shared for line in path.read_text().splitlines() if of_programs.search(line)] == []


def test_nobody_asks_which_layout_it_has() -> None:
    """What differs between layouts is a method or an attribute of theirs. Names are compared by the registry alone."""
    names = {name for layout in list_layouts() for name in (layout.name, *layout.other_names)}
    classes = {"Layout", *(type(layout).__name__ for layout in list_layouts())}
    found = []
    for path in LIBRARY:
        for node in code_of(path):
            if isinstance(node, ast.Compare):
                held = {word for part in ast.walk(node) for word in words_of(part)}
                texts = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)}
                if (names & texts and any("layout" in word for word in held)) or "NATIVE" in held:
                    found.append((str(path.relative_to(ROOT / "xla_ckpt")), ast.unparse(node)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                kinds = {word for part in ast.walk(node.args[1]) for word in words_of(part)}
                assert not kinds & classes, (path, node.lineno)
    assert sorted(found) == [
        ("formats/registry.py", "layout is not NATIVE"),  # the last one asked, as it takes every tag of ours
        ("rendering/reports.py", "facts['layout'] == 'native'"),  # what is usual is not mentioned
        ("rendering/reports.py", "t['layout'] not in (None, 'native')"),
    ]


def imports_of(path: Path, *, lazy: bool) -> set[str]:
    """Return the modules of the library that a module imports; with `lazy`, also those that its functions import."""
    found: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
        is_type_checking = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if lazy or not (is_type_checking or isinstance(node, ast.FunctionDef)):
            todo += ast.iter_child_nodes(node)
    return found & MODULES.keys() - {name_of(path)}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {name_of(path): path for path in SOURCES}

CIRCLES = {
    "xla_ckpt.conversion.convert", "xla_ckpt.features.products.product", "xla_ckpt.saving.request",
    "xla_ckpt.formats.nxd.files", "xla_ckpt.formats.nxd.layout",
    "xla_ckpt.formats.orbax.layout", "xla_ckpt.formats.orbax.scan", "xla_ckpt.formats.orbax.tensorstore_arrays",
    *(f"xla_ckpt.formats.rank_files.{name}" for name in (
        "arrays", "conversion", "files", "layout", "model", "optimizer", "reading", "writing")),
    *(f"xla_ckpt.formats.torch_checkpointing.{name}" for name in ("layout", "reading", "writing")),
    "xla_ckpt.state.model_state", "xla_ckpt.state.torch_module", "xla_ckpt.state.model_view", "xla_ckpt.state.wrappers",
}  # fmt: skip
"""Modules that import each other within functions or for annotations. No module may be added."""


@pytest.mark.parametrize(("lazy", "known"), [(False, set()), (True, CIRCLES)])
def test_modules_do_not_import_each_other(lazy: bool, known: set[str]) -> None:
    imports = {name: imports_of(path, lazy=lazy) for name, path in MODULES.items()}
    circles = set()
    for name in MODULES:
        reached: set[str] = set()
        todo = [name]
        while todo:
            todo += imports[todo.pop()] - reached
            reached.update(todo)
        if name in reached:
            circles.add(name)
    assert circles == known


OPENERS = {"open", "io.open", "io.FileIO", "np.load", "np.save", "np.fromfile", "np.memmap", "codecs.open"}


def test_files_are_opened_by_storage_alone() -> None:
    """Who may import os and its like, the contracts of import-linter say; nothing has to be imported for `open`."""
    opened = {
        str(path.relative_to(ROOT / "xla_ckpt"))
        for path in LIBRARY
        for node in code_of(path)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in OPENERS
    }
    assert {name for name in opened if not name.startswith("storage/")} == {
        "__main__.py",  # /dev/null, in the place of a closed stream
    }


def test_tensors_are_made_on_a_named_device() -> None:
    """A program may have set a default device (torch.set_default_device), which is not for the library's buffers."""
    constructors = set(map(id, _device_constructors()))
    factories = {f"torch.{name}" for name in dir(torch) if id(getattr(torch, name)) in constructors}
    assert {"torch.empty", "torch.tensor", "torch.sparse_csr_tensor"} <= factories
    factories.add("torch.nested.nested_tensor")
    unnamed = []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        named = {
            id(node.func)
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and any(keyword.arg == "device" for keyword in node.keywords)
        }
        unnamed += [
            f"{path}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and ast.unparse(node) in factories and id(node) not in named
        ]
    assert unnamed == []

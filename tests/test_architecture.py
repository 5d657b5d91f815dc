"""House rules that no linter knows."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.runs import ROOT, environment

HOMES_OF_PATHS = ("xla_ckpt/tree/schema.py", "xla_ckpt/tree/optimizer_schema.py")
PATHS_OF_THE_STATE = re.compile(
    r"^(model|optimizer|scheduler|extras|user_content)(/|$)|param_groups|^(state|master|per_rank|ranks|step)$"
    r"|(^|/)(state|master|ranks)/|exp_avg|momentum_buffer"
)
FOREIGN = {
    "xla_ckpt/__init__.py": {"state"},  # a package
    "xla_ckpt/cli/bars.py": {"ranks"},  # keys of what the commands print
    "xla_ckpt/cli/facts.py": {"ranks"},
    "xla_ckpt/cli/options.py": {"model", "optimizer"},  # arguments of the public functions
    "xla_ckpt/cli/render.py": {"ranks"},
    "xla_ckpt/engine/rank_timings.py": {"ranks"},  # how many saved
    "xla_ckpt/integrations/accelerate.py": {"step"},  # a key of our own
    "xla_ckpt/integrations/lightning.py": {"optimizer", "scheduler", "step"},  # beginnings of names of extras, a key
    "xla_ckpt/integrations/transformers.py": {"model", "optimizer"},  # arguments of the Trainer's events
    "xla_ckpt/layouts/places.py": {"model", "scheduler"},  # what programs call them
    "xla_ckpt/layouts/dcp/shards.py": {"model"},  # a part of names of files
    # Folders of neuronx-distributed's tags, and keys of its files.
    "xla_ckpt/layouts/nxd/convert_zero.py": {"model"},
    "xla_ckpt/layouts/nxd/layout.py": {"model/"},
    "xla_ckpt/layouts/nxd/files.py": {"model", "optimizer", "scheduler"},
    "xla_ckpt/layouts/nxd/writing.py": {"param_groups", "state"},
    "xla_ckpt/layouts/by_rank/optimizer.py": {
        "param_groups",
        "state",
        "the optimizer of a rank file has no param_groups",
    },
    "xla_ckpt/layouts/by_rank/tags.py": {"model"},
    "xla_ckpt/layouts/smp/file_contents.py": {"param_groups", "state"},  # keys of SMP's files
    "xla_ckpt/layouts/smp/tags.py": {"model", "optimizer"},  # a part of names of SMP's files
    "xla_ckpt/state/wrappers.py": {"optimizer"},  # the attribute of a wrapper
}
"""Strings that look like paths of a state, and are words of something else."""

SOURCES = sorted(p for package in ("xla_ckpt", "neuron_compat") for p in (ROOT / package).rglob("*.py"))
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


def test_the_first_torch_name_loads_neither_torch_xla_nor_jax_nor_orbax() -> None:
    modules = imported(
        "import xla_ckpt; xla_ckpt.save_checkpoint, xla_ckpt.restore, xla_ckpt.RNGState, xla_ckpt.ArraySpec"
    )
    assert "torch" in modules
    assert not {m for m in modules if re.match(r"(torch_xla|jax|orbax)\b", m)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_are_named_for_something(path: Path) -> None:
    if str(path.relative_to(ROOT)) != "neuron_compat/nxd/parallel_layers/utils.py":  # neuronx-distributed's name
        assert path.stem not in ("utils", "common", "helpers", "misc", "types")


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
    spelled = {
        name: {text for text in strings(path) if "\n" not in text and PATHS_OF_THE_STATE.search(text)}
        for path in SOURCES
        if (name := str(path.relative_to(ROOT))).startswith("xla_ckpt/")
    }
    assert {"model", "optimizer", "param_groups", "master", "step", "exp_avg"} <= set().union(
        *(spelled.pop(home) for home in HOMES_OF_PATHS)
    )
    assert {name: found for name, found in spelled.items() if found} == FOREIGN


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


LIBRARY = [p for p in SOURCES if p.is_relative_to(ROOT / "xla_ckpt")]


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


NAMES_IT = {  # where code names neuronx-distributed or its layouts, and why
    "api/save.py": "use_xser=, an argument of its own function",
    "api/wish.py": "use_xser= says which layout is meant",
    "cli/main.py": "examples of convert --to",
    "cli/options.py": "the help of --like, which is for its tags",
    "cli/writing.py": "the help of --zero1, likewise",
    "facade.py": "calls of its converter, for the facade",
    "job/mesh_source.py": "asks its parallel_state for the mesh, whatever the layout is",
    "layouts/by_rank/arrays.py": "a hint at what it loses with context parallelism",
    "layouts/by_rank/copies.py": "an error says which adapters it has joined",
    "layouts/by_rank/folders.py": "the folders of its tags, which optimum-neuron's have, too",
    "layouts/by_rank/grid.py": "a hint at the files that it leaves out",
    "layouts/llama_manifest.py": "hints at the names of its examples",
    "layouts/llama_heads.py": "hints at the names of its examples",
    "layouts/llama_names.py": "likewise",
    "layouts/peft.py": "errors say what its adapters cannot be, and where it leaves their configuration",
    "layouts/registry.py": "the list of layouts",
    "plan/merge.py": "a hint at its attributes on parameters",
    "state/wrappers.py": "an attribute of its wrappers, by which they are told from others",
}


ABOUT_IT = [ROOT / "xla_ckpt/layouts" / name for name in ("nxd", "optimum", "smp")]
"""Its own package, that of optimum-neuron's checkpoints, in which its rank files lie, and that of SageMaker's."""


def test_only_its_own_package_knows_neuronx_distributed() -> None:
    found = {
        str(path.relative_to(ROOT / "xla_ckpt"))
        for path in LIBRARY
        if not any(path.is_relative_to(folder) for folder in ABOUT_IT)
        for node in code_of(path)
        if any(re.search(r"nxd|neuronx|xser", word, re.IGNORECASE) for word in words_of(node))
    }
    assert found == set(NAMES_IT), "found what is not listed, or listed what is gone"


def test_nobody_asks_which_layout_it_has() -> None:
    """What differs between layouts is a method or an attribute of theirs. Names are compared by the registry alone."""
    names = {"native", "xser", "pt", "nxd", "safetensors", "peft", "dcp", "smp"}
    found = []
    for path in LIBRARY:
        for node in code_of(path):
            if isinstance(node, ast.Compare):
                held = {word for part in ast.walk(node) for word in words_of(part)}
                if (names & held and any("layout" in word for word in held)) or "NATIVE" in held:
                    found.append((str(path.relative_to(ROOT / "xla_ckpt")), ast.unparse(node)))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                kinds = {word for part in ast.walk(node.args[1]) for word in words_of(part)}
                layouts = {"Native", "NeuronxDistributed", "HuggingFace", "SageMaker", "Layout"}
                assert not kinds & layouts, (path, node.lineno)
    assert sorted(found) == [
        ("cli/render.py", "facts['layout'] == 'native'"),  # what is usual is not mentioned
        ("cli/render.py", "t['layout'] not in (None, 'native')"),
        ("layouts/registry.py", "layout is not NATIVE"),  # the last one asked, as it takes every tag of ours
    ]


FILE_SYSTEM = {"os", "shutil", "fcntl", "pathlib", "tempfile", "glob", "stat"}
OPENERS = {"open", "io.open", "io.FileIO", "np.load", "np.save", "np.fromfile", "np.memmap", "codecs.open"}
TOUCHES_FILES = {  # module: what it uses of them; None is all
    "storage/local.py": None,
    "storage/local_file.py": None,
    "storage/program.py": None,  # a process, and descriptors that it gets
    "tags/orbax_process.py": None,  # orbax works on paths, and has an environment of its own
    "storage/door.py": {"os.PathLike", "os.fspath", "os.path"},
    "storage/this_process.py": None,  # /proc says which processes there are
    "storage/pool.py": {"os.cpu_count"},
    "storage/trace_file.py": None,  # a trace lies where the user wants it, in no store
    "integrations/transformers.py": {"os.path", "tempfile.TemporaryDirectory", "open"},  # a Trainer reads a folder
    "job/job.py": {"os.environ"},
    "job/process_group.py": {"os.environ"},
    "cli/facts.py": {"os.getcwd"},  # from where --like imports
    "layouts/torch_save/pickle_names.py": {"pathlib.Path"},  # as a value that a state holds
    "state/values.py": {"pathlib.Path", "pathlib.PurePosixPath", "pathlib.PureWindowsPath"},  # likewise
}  # fmt: skip


def test_files_are_reached_through_storage_alone() -> None:
    found: dict[str, set[str]] = {}
    for path in LIBRARY:
        used = {
            f"{node.value.id}.{node.attr}"
            for node in code_of(path)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in FILE_SYSTEM
        }
        calls = {ast.unparse(node.func) for node in code_of(path) if isinstance(node, ast.Call)}
        # A name that is imported from such a module hides where it comes from.
        hidden = {
            f"from {node.module} import"
            for node in code_of(path)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FILE_SYSTEM
        }
        if used := used | (calls & OPENERS) | hidden:
            found[str(path.relative_to(ROOT / "xla_ckpt"))] = used
    assert set(found) == set(TOUCHES_FILES)
    for name, allowed in TOUCHES_FILES.items():
        assert allowed is None or found[name] == allowed, name


STILL_IN_SEVERAL_MODULES = {
    "CheckpointCallback", "MAX_DEPTH", "apart", "class_of", "compose", "convert", "diff", "dump", "explain",
    "is_name", "load", "main", "owner_of", "parameters_of", "parse", "parts", "roots_below", "save", "size",
    "tree_of", "verify",
}  # fmt: skip
"""Public names that stood in several modules when this was first counted. The list may only get shorter."""


def public_names(path: Path) -> Iterator[str]:
    """What a module defines for others. Its logger and its type variables are its own."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith("TypeVar("):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_") and name != "logger")


def test_a_public_name_stands_in_one_module() -> None:
    modules: dict[str, set[str]] = {}
    for path in LIBRARY:
        for name in public_names(path):
            modules.setdefault(name, set()).add(str(path.relative_to(ROOT)))
    several = {name: sorted(paths) for name, paths in modules.items() if len(paths) > 1}
    assert not {name: paths for name, paths in several.items() if name not in STILL_IN_SEVERAL_MODULES}


UNSAID = {"found", "held", "made", "mine", "told"}
"""Names of variables that say only that there is something."""

FUNCTIONS_WITH_UNSAID = 1
"""How many functions of the library have such a variable. The number may only get smaller."""


def variables_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Its parameters, and what is assigned in it."""
    nodes = list(ast.walk(function))
    parameters = {node.arg for node in nodes if isinstance(node, ast.arg)}
    return parameters | {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def test_variables_are_called_what_they_are() -> None:
    functions = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in LIBRARY
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and UNSAID & variables_of(node)
    ]
    assert len(functions) <= FUNCTIONS_WITH_UNSAID, "\n".join(functions)

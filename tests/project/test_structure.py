"""The shape of the code base: which way imports point, who may import what, what stays light.

``LAYERS`` is the map of docs/architecture.md as data. A new module has to find its place there.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import mxquant

ROOT = Path(__file__).resolve().parents[2]

# A unit is a module or package directly under `mxquant`. It may import those further up, and within itself.
LAYERS = (
    ("errors",),
    ("extras",),
    ("bundled", "presentation", "schemes"),
    ("codec",),
    ("checkpoint", "kernels"),
    ("ops",),
    ("nn", "theory"),
    ("transformers",),
    ("convert", "training"),
    ("_autoload", "analysis"),
    ("inspection",),
    ("evals",),
    ("cli",),
    ("__main__",),
)
LEVEL = {unit: level for level, layer in enumerate(LAYERS) for unit in layer}

# Who may import a package that the rest must do without.
ONLY_IN = {
    "transformers": ("mxquant.transformers", "mxquant.training", "mxquant.evals"),
    "lm_eval": ("mxquant.evals.tasks",),
    "huggingface_hub": ("mxquant.checkpoint.reader", "mxquant.checkpoint.upload", "mxquant.evals"),
    "compressed_tensors": (),
    "datasets": ("mxquant.evals",),
    "matplotlib": ("mxquant.presentation", "mxquant.evals"),
    "click": ("mxquant.cli",),
    "rich": ("mxquant.cli", "mxquant.presentation"),
    "peft": ("mxquant.transformers.lora",),
    "triton": ("mxquant.kernels.triton",),
}


@dataclass(frozen=True)
class Import:
    """``module`` (ours, as installed) imports ``name``, the longest module name known, at ``line``."""

    module: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.module} line {self.line}: {self.name}"


def package_folders() -> dict[str, Path]:
    """Import package -> folder, as pyproject.toml maps them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {name: ROOT / folder for name, folder in settings["tool"]["setuptools"]["package-dir"].items()}


def sources() -> dict[str, Path]:
    """Every module of the installed package, mapped folders included: dotted name -> file."""
    found = {}
    for package, folder in package_folders().items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


SOURCES = sources()
TREES = {name: ast.parse(path.read_bytes(), str(path)) for name, path in SOURCES.items()}


def imports_of(module: str) -> Iterator[Import]:
    """All imports, those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield Import(module, resolve(str(node.module), alias.name), node.lineno)


def resolve(package: str, name: str) -> str:
    """What ``from package import name`` imports: a submodule, or a name that a module defines."""
    if f"{package}.{name}" in SOURCES:
        return f"{package}.{name}"
    return mxquant._EXPORTS.get(name, package) if package == "mxquant" else package


def imports_by_name(module: str, tree: ast.Module) -> Iterator[Import]:
    """Modules of ours that a module may import by a string: those that strings in it name, where it imports so."""
    if not any(_name(node) in ("import_module", "__import__") for node in ast.walk(tree)):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            built = node.value.startswith("mxquant.") and node.value.endswith(".")  # of a name made in pieces
            for name in SOURCES if built else (node.value,):
                if name in SOURCES and name.startswith(node.value):
                    yield Import(module, name, node.lineno)


def _name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


# `mxquant/__init__.py` re-exports names of every layer, and `cli/main.py` names every command, lazily.
LAZY = ("mxquant", "mxquant.cli.main")
IMPORTS = [i for module in SOURCES if module != "mxquant" for i in imports_of(module)]
IMPORTS += [i for module in SOURCES if module not in LAZY for i in imports_by_name(module, TREES[module])]


def unit(module: str) -> str:
    return module.split(".")[1]


def is_within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(f"{p}.") for p in packages)


def test_every_module_has_a_layer():
    assert {unit(m) for m in SOURCES if m != "mxquant"} == set(LEVEL), "place it in LAYERS and docs/architecture.md"


def test_imports_point_one_way():
    def allowed(i: Import) -> bool:
        if not i.name.startswith("mxquant."):
            return True
        here, there = unit(i.module), unit(i.name)
        return here == there or LEVEL[there] < LEVEL[here]

    assert not [str(i) for i in IMPORTS if not allowed(i)]


def test_no_module_imports_itself_in_a_circle():
    # A package may know its own parts: `mxquant.transformers.register` imports them when it is called.
    edges = {(i.module, i.name) for i in IMPORTS if i.name in SOURCES and not is_within(i.name, (i.module,))}
    while True:  # an edge lies on no circle if nothing leads to it, or on from it
        starts, ends = {a for a, _ in edges}, {b for _, b in edges}
        kept = {(a, b) for a, b in edges if a in ends and b in starts}
        if kept == edges:
            break
        edges = kept
    assert not sorted(edges), "these modules import each other"


@pytest.mark.parametrize(
    "line", ['importlib.import_module("mxquant.nn.quant_linear")', 'import_module(f"mxquant.nn.{name}")']
)
def test_imports_by_a_string_are_seen(line):
    found = imports_by_name("mxquant.codec.qtensor", ast.parse(line))
    assert "mxquant.nn.quant_linear" in [i.name for i in found]
    assert not list(imports_by_name("mxquant.codec.qtensor", ast.parse('print("mxquant.nn.quant_linear")')))


def test_the_codec_and_the_readers_of_files_need_no_operators():
    modules = "mxquant.checkpoint.formats.gpt_oss, mxquant.codec.dynamic"
    assert not [m for m in imported_by(f"import {modules}") if m.startswith(("mxquant.ops", "mxquant.kernels"))]


def test_packages_are_imported_only_where_they_belong():
    strays = [
        str(i)
        for i in IMPORTS
        if (package := i.name.split(".")[0]) in ONLY_IN and not is_within(i.module, ONLY_IN[package])
    ]
    assert not strays


def test_lm_eval_is_imported_in_one_file():
    assert len({i.module for i in IMPORTS if i.name.split(".")[0] == "lm_eval"}) == 1


def test_imports_are_absolute():
    relative = [
        f"{SOURCES[module]}:{node.lineno}"
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_mapped_folders_are_only_reachable_as_parts_of_mxquant():
    names = {folder.name for package, folder in package_folders().items() if package != folder.name}
    assert names == {"cli", "evals", "kernels"}
    assert not [str(i) for i in IMPORTS if i.name.split(".")[0] in names]


def test_init_of_a_mapped_folder_is_a_docstring_only():
    for package, folder in package_folders().items():
        if package != folder.name:
            (statement,) = TREES[package].body
            assert isinstance(statement, ast.Expr)
            assert isinstance(statement.value, ast.Constant)
            assert isinstance(statement.value.value, str)


def test_importing_mxquant_imports_the_standard_library_only():
    new = imported_by("import mxquant")
    assert {name.split(".")[0] for name in new} - set(sys.stdlib_module_names) == {"mxquant"}
    assert {name for name in new if name.startswith("mxquant")} == {"mxquant"}


def test_formats_recipes_and_descriptions_of_checkpoints_need_no_torch():
    modules = (
        "mxquant.schemes.formats, mxquant.schemes.recipe, mxquant.checkpoint.formats.native, mxquant.checkpoint.layout"
    )
    assert "torch" not in imported_by(f"import {modules}")


def test_help_needs_neither_torch_nor_transformers():
    calls = ["--help"], *([name, "--help"] for name in _commands())
    for call in calls:
        new = imported_by(f"from mxquant.cli.main import main; main({call}, standalone_mode=False)")
        assert not new & {"torch", "transformers", "numpy", "rich", "lm_eval", "matplotlib", "scipy"}, call


def _commands() -> list[str]:
    from mxquant.cli.main import main

    return main.list_commands(None)


def imported_by(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has imported after ``code``, not counting its own start."""
    program = (
        "import sys, json, contextlib, io\nbefore = set(sys.modules)\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    {code}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return set(ast.literal_eval(done.stdout.splitlines()[-1]))


def test_the_map_in_the_documentation_is_that_of_the_code():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/.-])(?:mxquant|cli|evals|tests|benchmarks|docs)/[\w/.-]*\w", text))
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]
    units = {f"mxquant/{unit(m)}" for m in SOURCES if SOURCES[m].is_relative_to(ROOT / "mxquant") and m != "mxquant"}
    assert not [u for u in sorted(units) if not re.search(rf"{u}(\.py|/|\b)", text)]


def test_tests_import_neither_other_tests_nor_private_names():
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
            if isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names if f"{node.module}.{alias.name}" not in SOURCES]
                private = [n for n in names if n.startswith("_") and str(node.module).startswith("mxquant")]
                if private or str(node.module).rpartition(".")[2].startswith("test_"):
                    found.append(f"{path.relative_to(ROOT)}: {node.module} {private}")
    assert not found

"""The one-way import rule of CONTRIBUTING.md, checked on the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "cli": 9,
    "server": 8,
    "lab": 8,
    "engine": 7,
    "draft/train": 6,  # with its teacher, a target
    "scheduler": 5,
    "draft": 5,
    "target": 5,
    "runner": 4,
    "layers": 3,
    "memory": 3,
    "core": 2,
    "kernels": 1,
}


def package_of(parts: tuple[str, ...]) -> str | None:
    if parts[0] == "specengine":
        parts = parts[1:]
    if parts[:2] == ("draft", "train"):
        return "draft/train"
    return parts[0] if parts and parts[0] in PACKAGES else None


def imports(tree: ast.AST) -> list[tuple[int, str]]:
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.append((node.lineno, node.module or ""))
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
    return found


def breaches(importer: str, tree: ast.AST) -> list[str]:
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    bad = [f"line {node.lineno}: relative import" for node in froms if node.level]
    for line, module in imports(tree):
        parts = tuple(module.split("."))
        if parts[0] in {"draft", "target", "kernels"}:
            bad.append(f"line {line}: import {module} as specengine.{module}")
        imported = package_of(parts) if parts[0] == "specengine" else None
        if imported is None or imported == importer:
            continue
        if PACKAGES[imported] >= PACKAGES[importer]:
            bad.append(f"line {line}: {importer} may not import {imported}")
    return bad


# Circles that still stand, by their modules. None may be added, and one that is gone leaves here.
CIRCLES = {
    # A worker drafts by chain or tree, which run the worker's levels.
    frozenset(f"specengine.draft.{name}" for name in ("chain", "tree", "worker")),
    # A task writes its model, whose shape is declared beside the task.
    frozenset(f"specengine.draft.train.{name}" for name in ("causal_lm", "model_directory")),
}


def imported_modules(tree: ast.AST, modules: set[str]) -> set[str]:
    """Those of `modules` that a file imports, anywhere in it, TYPE_CHECKING included. A name taken
    from a package is its submodule of that name, or else the package itself."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in modules else node.module or "" for name in names)
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found & modules


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules that all reach each other by imports."""
    reached = {module: set(imported) for module, imported in graph.items()}
    for between in graph:
        for module in graph:
            if between in reached[module]:
                reached[module] |= reached[between]
    return {
        frozenset(other for other in found if module in reached[other])
        for module, found in reached.items()
        if module in found
    }


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "specengine" else ("specengine", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources() -> list[Path]:
    tops = [ROOT / name for name in ("specengine", "draft", "target", "kernels")]
    return [path for top in tops for path in sorted(top.rglob("*.py")) if _is_real(path)]


def _is_real(path: Path) -> bool:
    between = path.relative_to(ROOT).parents
    return not any((ROOT / parent).is_symlink() for parent in between)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.AST]:
    return {path: ast.parse(path.read_text()) for path in sources()}


def test_imports_go_one_way(trees: dict[Path, ast.AST]) -> None:
    packages = {path: package_of(path.relative_to(ROOT).parts) for path in trees}
    assert set(packages.values()) >= set(PACKAGES)
    bad = {
        str(path.relative_to(ROOT)): breaches(package, trees[path])
        for path, package in packages.items()
        if package
    }
    assert {path: found for path, found in bad.items() if found} == {}


def test_no_room_has_an_import_circle(trees: dict[Path, ast.AST]) -> None:
    packages: dict[str, dict[str, ast.AST]] = {}
    for path, tree in trees.items():
        package = package_of(path.relative_to(ROOT).parts)
        if package is not None:
            packages.setdefault(package, {})[module_name(path)] = tree
    found: set[frozenset[str]] = set()
    for room in packages.values():
        modules = set(room)
        graph = {name: imported_modules(tree, modules) - {name} for name, tree in room.items()}
        found |= circles(graph)
    assert found == CIRCLES


def test_circle_is_seen_through_type_checking_imports_and_other_modules() -> None:
    modules = {"package.a", "package.b", "package.c", "package"}
    texts = {
        "package.a": "if TYPE_CHECKING:\n    from package import b",
        "package.b": "def f():\n    import package.c",
        "package.c": "from package.a import X",
        "package": "from package.a import X",
    }
    graph = {name: imported_modules(ast.parse(text), modules) for name, text in texts.items()}
    assert circles(graph) == {frozenset({"package.a", "package.b", "package.c"})}
    graph["package.b"] = set()
    assert circles(graph) == set()


@pytest.mark.parametrize("folder", ["draft", "target", "kernels"])
def test_top_folders_are_namespaces(folder: str) -> None:
    """A top-level kernels/__init__.py would shadow the package that transformers imports."""
    assert not (ROOT / folder / "__init__.py").exists()
    assert (ROOT / "specengine" / folder).resolve() == (ROOT / folder).resolve()


def test_the_rule_sees_breaches() -> None:
    assert breaches("core", ast.parse("from specengine.memory.radix import X"))
    assert breaches("draft", ast.parse("import specengine.target.registry"))
    assert breaches("draft", ast.parse("from .tree import X"))
    assert breaches("kernels", ast.parse("from specengine.core import batch"))
    assert breaches("engine", ast.parse("from kernels.linear.norm import rms_norm"))
    assert breaches("draft", ast.parse("from specengine.draft.train.loop import train"))
    assert breaches("lab", ast.parse("from specengine.server.app import app"))
    assert not breaches("draft/train", ast.parse("import specengine.target.registry"))
    assert not breaches("engine", ast.parse("from specengine.core.batch import ForwardBatch"))

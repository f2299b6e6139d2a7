"""What pages name in code type is there: files, and names of the sources."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.test_layering import ROOT

PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FOLDERS = ("specengine", "draft", "target", "kernels", "tests", "benchmarks", "deploy")
SUFFIXES = {".py", ".cu", ".cuh", ".toml", ".sh", ".yaml", ".yml", ".json"}
NAME = re.compile(r"`([A-Za-z_][\w./]*)(?:\(\))?`")
BLOCK = re.compile(r"```.*?```", re.DOTALL)
# What pages make up: files of examples and patterns, what a build leaves; fields whose names are
# put together; what others have.
INVENTED = {
    *("op.py", "op_ref.py", "op_triton.py", "op_cuda.py", "op_sgl.py"),
    *("draft/echo.py", "target/verify/cautious.py", "SHARE"),
    *("build/site", "match_k", "spec_decode_num_draft_tokens_per_pos"),
    *("DeepseekV32ForCausalLM", "ld.global.nc"),
}


@pytest.fixture(scope="module")
def files() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    return [path for path in found if "__pycache__" not in path.parts]


@pytest.fixture(scope="module")
def words(files: list[Path]) -> set[str]:
    texts = (path.read_text(encoding="utf-8") for path in files if path.suffix in SUFFIXES)
    return {word for text in texts for word in re.findall(r"\w+", text)}


def is_there(name: str, words: set[str], paths: set[str]) -> bool:
    last = name.rstrip("/").rpartition("/")[2]
    if (ROOT / name).exists():
        return True
    if "/" in name or name.endswith(".py"):
        stem, dot, field = last.partition(".")
        is_field = bool(dot) and field not in ("py", "md", "json", "jsonl", "toml")
        return last in paths or (is_field and f"{stem}.py" in paths and field in words)
    is_symbol = "_" in name or "." in name or name[0].isupper()
    return not is_symbol or is_word(last.rpartition(".")[2], words)


def is_word(name: str, words: set[str]) -> bool:
    """Written as it is, or put together of a beginning that ends with _, as metrics are."""
    ends = [place + 1 for place, char in enumerate(name) if char == "_"]
    return name in words or any(name[:end] in words and name[end:] in words for end in ends)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_node_of_a_diagram_has_one_text(page: Path) -> None:
    """Mermaid draws two nodes of one id as one."""
    for diagram in re.findall(r"```mermaid\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        nodes = re.findall(r"\b(\w+)\[([^\]]+)\]", diagram)
        assert len({name for name, _ in nodes}) == len(nodes) == len(set(nodes))


def test_names_in_pages_are_those_of_the_sources(files: list[Path], words: set[str]) -> None:
    paths = {path.name for path in files}
    missing = [
        (page.name, name)
        for page in PAGES
        for name in NAME.findall(BLOCK.sub("", page.read_text(encoding="utf-8")))
        if name not in INVENTED and not is_there(name, words, paths)
    ]
    assert missing == [], "mend the pages, or add what they make up to INVENTED"


def test_names_that_are_not_there_are_found(words: set[str]) -> None:
    paths = {"rules.py"}
    assert not is_there("no" + "_such_name", words, paths)
    assert not is_there("engine/round/no_such.py", words, paths)
    assert not is_there("engine/round/rules.no" + "_such_name", words, paths)
    assert is_there("engine/round/rules.py", words, paths)

"""Adds pages to the site that lie outside docs/, tests that pages link to among them, and turns
links between files of the repository into links of the site. mkdocs.yml names this file."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Folder or file of the repository -> its place in the site.
PLACES = {
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/results": "results",
    "draft/zoo": "zoo/draft",
    "target/zoo": "zoo/target",
    "tests": "tests",
    "docs": "",
}
GLOBS = ("CONTRIBUTING.md", "benchmarks/results/*.md", "benchmarks/results/*.png", "*/zoo/*/*.md")
# In the text, or below it for the words in brackets.
LINK = re.compile(
    r"\[(?P<words>[^\]]*)\](?P<form>\(|: )(?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?(?:\)|$)",
    re.MULTILINE,
)


def place_of(path: str) -> str | None:
    """Place in the site of a file of the repository, None where the site lacks it."""
    for folder, place in PLACES.items():
        if path == folder:
            return place
        if path.startswith(folder + "/"):
            found = posixpath.normpath(posixpath.join(place, path.removeprefix(folder + "/")))
            return re.sub(r"\.py$", ".md", found)
    return None


def linked_tests(markdown: str, folder: str) -> set[str]:
    """Test files that a page in this folder of the repository links to."""
    paths = {
        posixpath.normpath(posixpath.join(folder, one["path"])) for one in LINK.finditer(markdown)
    }
    return {path for path in paths if path.startswith("tests/") and path.endswith(".py")}


def listing(path: str) -> str:
    """A test file as a page, with a heading for each test, whose name is the anchor."""
    text = (ROOT / path).read_text(encoding="utf-8")
    tests = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    starts = [min(one.lineno for one in (node, *node.decorator_list)) - 1 for node in tests]
    lines, ends = text.splitlines(), [*starts, None]
    parts = ["---\nsearch: {exclude: true}\n---", f"# {path}", _code(lines[: ends[0]])]
    for node, start, end in zip(tests, starts, ends[1:], strict=True):
        parts += [f"## `{node.name}` {{ #{node.name} }}", _code(lines[start:end])]
    return "\n\n".join(parts)


def _code(lines: list[str]) -> str:
    return "````python\n" + "\n".join(lines).strip("\n") + "\n````"


def mend_links(markdown: str, folder: str, start: str, has_page: Callable[[str], bool]) -> str:
    """Of a page in this folder of the repository, and in `start` of the site. A link to a file that
    the site lacks keeps its words alone, if the file exists; otherwise it stays, and the strict
    build refuses it."""

    def mend(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        place = place_of(target)
        if place is not None and has_page(place):
            before, _, after = link[0].rpartition(link["path"])
            return f"{before}{posixpath.relpath(place, start)}{after}"
        is_outside = link["form"] == "(" and not target.startswith("docs/")
        return link["words"] if is_outside and (ROOT / target).exists() else link[0]

    return LINK.sub(mend, markdown)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for pattern in GLOBS:
        for path in sorted(ROOT.glob(pattern)):
            place = place_of(path.relative_to(ROOT).as_posix())
            assert place is not None, path
            files.append(File.generated(config, place, abs_src_path=str(path)))
    pages = [Path(one.abs_src_path) for one in files.documentation_pages()]
    linked = [linked_tests(page.read_text(encoding="utf-8"), _folder(page)) for page in pages]
    for path in sorted(set().union(*linked)):
        files.append(File.generated(config, place_of(path), content=listing(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if page.file.abs_src_path is None:  # a listing
        return markdown
    start = posixpath.dirname(page.file.src_uri) or "."
    folder = _folder(Path(page.file.abs_src_path))
    return mend_links(
        markdown, folder, start, lambda place: files.get_file_from_path(place) is not None
    )


def _folder(page: Path) -> str:
    return page.resolve().relative_to(ROOT).parent.as_posix()

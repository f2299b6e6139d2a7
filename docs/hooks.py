"""Adds pages to the site that lie outside docs/, and turns links between files of the repository
into links of the site. mkdocs.yml names this file."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Folder or file of the repository -> its place in the site.
PLACES = {
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/results": "results",
    "draft/zoo": "zoo/draft",
    "target/zoo": "zoo/target",
    "docs": "",
}
GLOBS = ("CONTRIBUTING.md", "benchmarks/results/*.md", "benchmarks/results/*.png", "*/zoo/*/*.md")
LINK = re.compile(r"\[(?P<words>[^\]]*)\]\((?P<path>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def place_of(path: str) -> str | None:
    """Place in the site of a file of the repository, None where the site lacks it."""
    for folder, place in PLACES.items():
        if path == folder:
            return place
        if path.startswith(folder + "/"):
            return posixpath.normpath(posixpath.join(place, path.removeprefix(folder + "/")))
    return None


def on_files(files: Any, config: Any) -> Any:
    for pattern in GLOBS:
        for path in sorted(ROOT.glob(pattern)):
            place = place_of(path.relative_to(ROOT).as_posix())
            assert place is not None, path
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a file that the site lacks keeps its words alone, if the file exists; otherwise it
    stays, and the strict build refuses it."""
    here = Path(page.file.abs_src_path).resolve().relative_to(ROOT).parent.as_posix()

    def mend(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, found["path"]))
        place = place_of(target)
        if place is not None and files.get_file_from_path(place) is not None:
            start = posixpath.dirname(page.file.src_uri) or "."
            return f"[{found['words']}]({posixpath.relpath(place, start)}{found['anchor'] or ''})"
        is_outside = not target.startswith("docs/")
        return found["words"] if is_outside and (ROOT / target).exists() else found[0]

    return LINK.sub(mend, markdown)

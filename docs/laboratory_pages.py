"""The pages of `lab/docs` as the part `lab/` of the one site.

Links between pages lead from file to file in the repository, so that they work where the files are
read; on the site they lead from page to page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

LABORATORY = Path(__file__).parents[1] / "lab" / "docs"
_LINK = re.compile(r"\]\(([\w./-]+\.md)(?=[#)])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the laboratory."""
    for page in sorted(LABORATORY.rglob("*.md")):
        place = posixpath.join("lab", page.relative_to(LABORATORY).as_posix())
        files.append(File.generated(config, place, abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    folder = posixpath.dirname(_in_repository(here))

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        return f"]({posixpath.relpath(_on_site(target), posixpath.dirname(here) or '.')}"

    return _LINK.sub(link, markdown)


def _in_repository(place: str) -> str:
    return f"lab/docs/{place[4:]}" if place.startswith("lab/") else f"docs/{place}"


def _on_site(path: str) -> str:
    if path.startswith("lab/docs/"):
        return f"lab/{path[9:]}"
    return path.removeprefix("docs/")

"""A hook of mkdocs (mkdocs.yml): the site is README.md as its first page, docs/, and all that these link to.

Pages link to sources, results and other pages of the repository by relative paths, which work wherever the repository
is shown. Linked files outside docs/ come into the site below repository/: pages as pages, the rest as it is. Links are
rewritten to match. A link to what is not there stays as it is, so mkdocs warns of it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_OUTSIDE = "repository/"
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and all that pages link to, and that links to."""
    waiting = [page.src_uri for page in files.documentation_pages()]
    _add(files, config, "README.md", waiting)
    while waiting:
        page = _path_of(waiting.pop())
        for target in _targets(page):
            if files.get_file_from_path(_uri_of(target)) is None:
                _add(files, config, target, waiting)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the page's links to where their targets lie in the site."""
    here = page.file.src_uri
    path = _path_of(here)

    def rewritten(found: re.Match[str]) -> str:
        target = _target(path, found[2])
        if target is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(_uri_of(target), posixpath.dirname(here))}{found[3] or ''}{found[4]}"

    pieces = _CODE.split(markdown)
    return "".join(piece if at % 2 else _LINK.sub(rewritten, piece) for at, piece in enumerate(pieces))


def _add(files: Files, config: Any, path: str, waiting: list[str]) -> None:
    uri = _uri_of(path)
    if path.endswith((".py", ".yml", ".toml", ".c", ".h", ".proto")) or "." not in Path(path).name:
        uri_text = f"```\n{(ROOT / path).read_text()}\n```\n"  # shown, not offered as a download
        files.append(File.generated(config, uri, content=f"# {path}\n\n{uri_text}"))
        return
    files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    if uri.endswith(".md"):
        waiting.append(uri)


def _targets(path: str) -> set[str]:
    """The files of the repository that a page links to."""
    text = _CODE.sub("", (ROOT / path).read_text())
    return {target for found in _LINK.finditer(text) if (target := _target(path, found[2])) is not None}


def _target(page: str, link: str) -> str | None:
    """The file of the repository that a link of a page means, None where it is none. A folder's is its README."""
    if ":" in link or link.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / path).is_dir():
        path += "/README.md"
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def _uri_of(path: str) -> str:
    """Where a file of the repository lies in the site's source."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not path.endswith((".md", ".svg", ".png", ".json")):
        path += ".md"
    return _OUTSIDE + path


def _path_of(uri: str) -> str:
    """The reverse, for pages."""
    if uri == "index.md":
        return "README.md"
    if uri.startswith(_OUTSIDE):
        return uri.removeprefix(_OUTSIDE)
    return f"docs/{uri}"

"""A hook of mkdocs (mkdocs.yml). The site is README.md as its first page, and docs/.

Pages link to other files of the repository by relative paths, which work wherever the repository is shown. The site has
the pages beside README.md, the examples and all images that are linked, below repository/. It names every other file
outside docs/ by its path. A link to a file that does not exist stays as it is, so mkdocs warns of it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_WHOLE_LINK = re.compile(r"(?<!!)\[((?:[^][`]|`[^`\n]*`)*)\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
_OUTSIDE = "repository/"
_IMAGES = (".svg", ".png")
_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
_TAGGED = re.compile(r"^```(\w+) ([\w.-]+)$", re.MULTILINE)  # a block with a name, by which tests find it


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, and the files outside docs/ that the site has and that its pages link to."""
    waiting = [page.src_uri for page in files.documentation_pages()]
    _add(files, config, "README.md", waiting)
    while waiting:
        page = _path_of(waiting.pop())
        for target in _targets(page):
            if files.get_file_from_path(_uri_of(target)) is None:
                _add(files, config, target, waiting)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrite the page's links to where their targets lie in the site, name the files that the site does not have, and
    write the openings of named blocks of code as Markdown knows them: a name that is a file's becomes the title.
    """
    here = page.file.src_uri
    path = _path_of(here)

    def named(found: re.Match[str]) -> str:
        target = _target(path, found[2])
        if target is None or _is_in_site(target):
            return found[0]
        return f"`{target}`" if found[1].strip("`") == target else f"{found[1]} (`{target}`)"

    def rewritten(found: re.Match[str]) -> str:
        target = _target(path, found[2])
        if target is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(_uri_of(target), posixpath.dirname(here))}{found[3] or ''}{found[4]}"

    pieces = _FENCE.split(markdown)
    markdown = "".join(piece if at % 2 else _WHOLE_LINK.sub(named, piece) for at, piece in enumerate(pieces))
    pieces = _CODE.split(markdown)
    return "".join(
        _TAGGED.sub(_opening, piece) if at % 2 else _LINK.sub(rewritten, piece) for at, piece in enumerate(pieces)
    )


def _opening(found: re.Match[str]) -> str:
    """The first line of a block of code, as Markdown knows it."""
    return f'```{found[1]} title="{found[2]}"' if "." in found[2] else f"```{found[1]}"


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
    """Return the files of the repository that a page links to and the site has."""
    text = _CODE.sub("", (ROOT / path).read_text())
    targets = {_target(path, found[2]) for found in _LINK.finditer(text)}
    return {target for target in targets if target is not None and _is_in_site(target)}


def _is_in_site(path: str) -> bool:
    """Whether the site has this file of the repository. Sources, tests and results are only named."""
    return "/" not in path or path.startswith(("docs/", "examples/")) or path.endswith(_IMAGES)


def _target(page: str, link: str) -> str | None:
    """Return the file that a link of a page leads to, or None. A link to a folder leads to its README."""
    if ":" in link or link.startswith("/"):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
    if (ROOT / path).is_dir():
        path += "/README.md"
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def _uri_of(path: str) -> str:
    """Return where a file of the repository lies in the site's source."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if not path.endswith((".md", ".svg", ".png", ".json")):
        path += ".md"
    return _OUTSIDE + path


def _path_of(uri: str) -> str:
    """Return the file of the repository that a page of the site's source comes from."""
    if uri == "index.md":
        return "README.md"
    if uri.startswith(_OUTSIDE):
        return uri.removeprefix(_OUTSIDE)
    return f"docs/{uri}"

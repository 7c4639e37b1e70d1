"""Which path shows what: NAME, NAME.npy, NAME.safetensors, NAME@VERSION. Pure.

A buffer's name is a path already: its slashes make the directories. What follows "@" no buffer's name can have.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

_PATH = re.compile(r"(?P<name>[^@]+?)(?:@(?P<version>[0-9]+|raw))?(?P<suffix>\.npy|\.safetensors)?")
PRIVATE = ".smb-files"  # the folder, of each namespace, of buffers on their way to a name or without one; not shown


class Form(str, Enum):
    """What of a buffer a file shows; the value is the end of its name."""

    RAW = ""
    NPY = ".npy"
    SAFETENSORS = ".safetensors"


@dataclass(frozen=True, slots=True)
class Shown:
    """What a path means. `version` is None for the buffer as it is now."""

    name: str
    form: Form = Form.RAW
    version: int | None = None

    @property
    def path(self) -> str:
        """The shortest path that means this."""
        return f"{self.name}{'' if self.version is None else f'@{self.version}'}{self.form.value}"


def meanings(path: str) -> tuple[Shown, ...]:
    """Return what a path (no leading slash) may mean, the first that exists is it: a buffer of exactly that name before
    a form of another one.
    """
    match = _PATH.fullmatch(path)
    if match is None:
        return ()
    name, version, suffix = match["name"], match["version"], match["suffix"] or ""
    if version == "raw":  # where a directory has the plain name
        return () if suffix else (Shown(name),)
    if version is not None:
        return (Shown(name, Form(suffix), int(version)),)
    return (Shown(path), Shown(name, Form(suffix))) if suffix and not name.endswith("/") else (Shown(path),)


def private_of(name: str) -> str:
    """Return the folder for what is to be, or was, a buffer of that name: who may use the one may use the other."""
    namespace, slash, _ = name.partition("/")
    return f"{namespace}/{PRIVATE}" if slash else PRIVATE


def is_private(path: str) -> bool:
    """Whether it is in a folder of what is not shown."""
    return PRIVATE in path.split("/")[:2]


def parent_of(path: str) -> str:
    """Return the directory of a path; "" is the root."""
    return path.rpartition("/")[0]


def is_directory(path: str, names: Iterable[str]) -> bool:
    """Return whether there is a buffer below that path."""
    return any(name.startswith(path + "/") for name in names)


def entries(directory: str, names: Iterable[str]) -> tuple[set[str], set[str]]:
    """Return (directories, buffers) of what is right inside a directory ("" is the root), by their last part."""
    start = directory + "/" if directory else ""
    directories: set[str] = set()
    buffers: set[str] = set()
    for name in names:
        if name.startswith(start):
            first, slash, _ = name[len(start) :].partition("/")
            if not is_private(name):
                (directories if slash else buffers).add(first)
    return directories, buffers


def files_of(last: str, forms: Iterable[Form], version: int | None, *, is_also_directory: bool) -> list[str]:
    """Return the files by which a directory shows a buffer, of whose name `last` is the last part. One that is called
    .npy or .safetensors itself was put there as such a file, and shows no other forms.
    """
    files = [last + "@raw" if is_also_directory else last]
    if not last.endswith((Form.NPY.value, Form.SAFETENSORS.value)):
        files += [last + form.value for form in forms if form is not Form.RAW]
    if version is not None:
        files.append(f"{last}@{version}")
    return files

"""Published states as directories: STATE/GENERATION/model.safetensors, and STATE/latest, for programs that load a model
from a directory.

STATE is the path of a buffer that a smb.torch.Publisher made. All files directly in STATE, such as a config.json, are
in the directory of each generation, too. Everything in there can only be read. A path that another buffer has is that
buffer's, as everywhere.
"""

from __future__ import annotations

import errno
import re
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from smb.buffer import Buffer
from smb.buffer_info import BufferInfo
from smb.client import Client
from smb.errors import NotFoundError
from smb.files.catalogue import Catalogue, Listing
from smb.files.contents import Frozen, FrozenFile
from smb.files.error_codes import refuse
from smb.files.formats import METADATA_KEY, FileView, view_of
from smb.files.names import Form
from smb.published import ABOUT, has_deltas
from smb.spi import versions_of

if TYPE_CHECKING:
    from smb.torch import Follower

LATEST = "latest"
MODEL = "model.safetensors"
_GENERATION = re.compile(r"latest|[1-9][0-9]{0,18}")
_OF_TORCH = {"format": "pt"}  # transformers refuses a file without it
_FRESH_S = 0.2  # how long a generation with deltas that is gone may still seem to be there; new ones are always seen
_OPENINGS_MAX = 5  # attempts to open the latest generation while it is overwritten


@dataclass(frozen=True, slots=True)
class Place:
    """A path STATE, STATE/GENERATION or STATE/GENERATION/FILE. The generation is a number or "latest"."""

    state: str
    info: BufferInfo
    generation: str = ""
    file: str = ""

    @property
    def beside(self) -> str:
        """The path of the file of that name directly in STATE."""
        return f"{self.state}/{self.file}"


class Generations:
    """The generations of all published states of a cluster. Thread-safe. `frozen` has the versions that are open."""

    def __init__(self, client: Client, catalogue: Catalogue, frozen: MutableMapping[tuple[int, int], Frozen]) -> None:
        self._client = client
        self._catalogue = catalogue
        self._frozen = frozen
        self._held: dict[int, tuple[float, frozenset[int]]] = {}  # by buffer id: when they were read, generations

    def at(self, path: str) -> Place | None:
        """Return what a path means in the directory of a state; None if it is not in one, or has another meaning."""
        parts = path.split("/")
        place = self._at(parts, self._catalogue.listing())
        if place is None and any(map(_GENERATION.fullmatch, parts[1:][-2:])):
            place = self._at(parts, self._catalogue.listing(missed=True))
        return place

    def _at(self, parts: list[str], found: Listing) -> Place | None:
        listing = (found.infos, found.folders)
        for count in range(max(1, len(parts) - 2), len(parts) + 1):
            info = found.infos.get("/".join(parts[:count]))
            rest = parts[count:]
            if info is None or not self.is_state(info):
                continue
            if rest and not _GENERATION.fullmatch(rest[0]):
                continue
            if any("/".join(parts[:end]) in taken for end in range(count + 1, len(parts) + 1) for taken in listing):
                continue
            return Place("/".join(parts[:count]), info, *rest)
        return None

    def is_state(self, info: BufferInfo) -> bool:
        """Return True for the buffer of a published state. A mirror is not one."""
        if info.versions < 2 or info.mirror_of:
            return False
        try:
            buffer = self._catalogue.known(info)
        except NotFoundError:
            return False
        return bool(buffer.table) and ABOUT in buffer.metadata

    def is_folder(self, path: str) -> bool:
        """Return True if a path is the directory of a state, or of a generation that is there."""
        place = self.at(path)
        if place is None or place.file:
            return False
        return not place.generation or self._number(place) is not None

    def number(self, place: Place) -> int:
        """Return the number of a generation that can be read. ENOENT."""
        number = self._number(place)
        if number is None:
            why = "there is no generation yet" if place.generation == LATEST else "it was overwritten, or is not there"
            raise refuse(errno.ENOENT, f"generation {place.generation} of {place.state!r}: {why}")
        return number

    def numbers(self, place: Place) -> list[int]:
        """Return the generations of a state that can be read now, in order."""
        try:
            return sorted(self._read_held(place.info) | self._open_here(place.info))
        except NotFoundError:  # another client has deleted the state since the listing
            return []

    def model(self, place: Place) -> FileView | None:
        """Return the view of model.safetensors; None if the format cannot hold the state."""
        buffer = self._catalogue.known(place.info)
        metadata = {METADATA_KEY: _OF_TORCH, **buffer.metadata}
        return view_of(Form.SAFETENSORS, place.info.dtype, place.info.shape, buffer.table, metadata)

    def open(self, place: Place) -> tuple[int, FrozenFile]:
        """Return the generation's number, and its model.safetensors, copied to this process's memory. ENOENT."""
        view = self.model(place)
        if view is None:
            raise refuse(errno.ENOENT, f"{place.state!r} has tensors that the format of safetensors does not have")
        buffer = self._catalogue.known(place.info)
        for _ in range(_OPENINGS_MAX):
            number = self.number(place)
            frozen = self._frozen.get(_key(buffer, number))
            try:
                if frozen is None:
                    frozen = self._frozen.setdefault(_key(buffer, number), self._read(buffer, number))
            except (NotFoundError, FileNotFoundError):
                if place.generation != LATEST:
                    raise
                continue  # it was overwritten meanwhile
            return number, FrozenFile(frozen, view, by_version=True)
        raise refuse(errno.ESTALE, f"{place.state!r} is published faster than it can be copied; publish less often")

    def _read(self, buffer: Buffer, number: int) -> Frozen:
        if not has_deltas(buffer):
            return Frozen(buffer, number)
        import torch

        views = self._follower(buffer).views(generation=number)
        memory = np.zeros(buffer.nbytes, np.uint8)
        for name, info in buffer.table.items():
            if info.nbytes:
                memory[info.offset : info.offset + info.nbytes] = views[name].reshape(-1).view(torch.uint8).numpy()
        return Frozen(buffer, number, memory=memory)

    def _number(self, place: Place) -> int | None:
        try:
            return self._found(place)
        except NotFoundError:  # another client has deleted the state since the listing
            return None

    def _found(self, place: Place) -> int | None:
        if place.generation == LATEST:
            buffer = self._catalogue.known(place.info)
            return (self._follower(buffer).latest if has_deltas(buffer) else buffer.version) or None
        number = int(place.generation)
        if number in self._open_here(place.info):
            return number
        buffer = self._catalogue.known(place.info)
        if not has_deltas(buffer):
            return number if versions_of(buffer).find(number)[1] >= 0 else None
        read_at, held = self._held.get(place.info.id, (float("-inf"), frozenset()))
        if number not in held or time.monotonic() - read_at > _FRESH_S:
            held = self._read_held(place.info)
        return number if number in held else None

    def _read_held(self, info: BufferInfo) -> frozenset[int]:
        buffer = self._catalogue.known(info)
        now = time.monotonic()
        held = frozenset(self._follower(buffer).generations if has_deltas(buffer) else versions_of(buffer).held())
        self._held = {key: each for key, each in self._held.items() if now - each[0] < _FRESH_S and key != info.id} | {
            info.id: (now, held)
        }
        return held

    def _open_here(self, info: BufferInfo) -> frozenset[int]:
        sign = -1 if has_deltas(self._catalogue.known(info)) else 1
        return frozenset(
            sign * number for buffer_id, number in list(self._frozen) if buffer_id == info.id and sign * number > 0
        )

    def _follower(self, buffer: Buffer) -> Follower:
        """Return a reader of a state with deltas. OSError EOPNOTSUPP without PyTorch, in which its tensors are made."""
        try:
            from smb.torch import follow
        except ImportError:
            raise refuse(
                errno.EOPNOTSUPP,
                f"{buffer.name!r} is published with deltas=, which only PyTorch can read here: pip install torch",
            ) from None
        return follow(self._client, buffer.name)


def _key(buffer: Buffer, number: int) -> tuple[int, int]:
    """Return the key of a generation among all versions that are open: with deltas, generations are not versions."""
    return buffer.info.id, -number if has_deltas(buffer) else number

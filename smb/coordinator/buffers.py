"""The buffers' records by key, with indices, so that a question about one server does not look at all records. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from smb.coordinator.records import BufferRecord

_NONE: Mapping[str, BufferRecord] = MappingProxyType({})


class _Index:
    """By server, the records with a copy there, each under its key; by id, the key; by source, its mirrors' keys; and
    the keys of records with a copy too few or too many.
    """

    def __init__(
        self,
        by_server: dict[str, dict[str, BufferRecord]],
        keys: dict[int, str],
        mirrors: dict[int, frozenset[str]],
        copies_wrong: dict[str, None],
    ) -> None:
        self.by_server, self.keys, self.mirrors, self.copies_wrong = by_server, keys, mirrors, copies_wrong

    @staticmethod
    def of(records: Iterable[BufferRecord]) -> _Index:
        by_server: dict[str, dict[str, BufferRecord]] = {}
        keys: dict[int, str] = {}
        mirrors: dict[int, set[str]] = {}
        copies_wrong: dict[str, None] = {}
        for record in records:
            keys[record.id] = record.key
            if record.copies_wrong:
                copies_wrong[record.key] = None
            for server in record.servers:
                by_server.setdefault(server, {})[record.key] = record
            if record.mirror_of:
                mirrors.setdefault(record.mirror_of, set()).add(record.key)
        return _Index(by_server, keys, {source: frozenset(found) for source, found in mirrors.items()}, copies_wrong)

    def changed(self, gone: Collection[BufferRecord], put: Iterable[BufferRecord]) -> _Index:
        """Return the index after these changes. The work depends on how many records the servers concerned have."""
        by_server, keys, mirrors = dict(self.by_server), dict(self.keys), dict(self.mirrors)
        copies_wrong = dict(self.copies_wrong)
        copied: set[str] = set()

        def of(server: str) -> dict[str, BufferRecord]:
            if server not in copied:
                copied.add(server)
                by_server[server] = dict(by_server.get(server, {}))
            return by_server[server]

        for record in gone:
            keys.pop(record.id, None)
            copies_wrong.pop(record.key, None)
            for server in record.servers:
                of(server).pop(record.key, None)
            if record.mirror_of:
                mirrors[record.mirror_of] = mirrors.get(record.mirror_of, frozenset()) - {record.key}
        for record in put:
            keys[record.id] = record.key
            if record.copies_wrong:
                copies_wrong[record.key] = None
            for server in record.servers:
                of(server)[record.key] = record
            if record.mirror_of:
                mirrors[record.mirror_of] = mirrors.get(record.mirror_of, frozenset()) | {record.key}
        # Nothing is kept for a server or a source that has no record left.
        for server in copied:
            if not by_server[server]:
                del by_server[server]
        for source in {record.mirror_of for record in gone if record.mirror_of}:
            if not mirrors[source]:
                del mirrors[source]
        return _Index(by_server, keys, mirrors, copies_wrong)


class Buffers(dict[str, BufferRecord]):
    """Records by key. Nothing changes one that was made: `changed` returns another. The indices are made when one is
    asked for first, and brought up to date by each change from then on.
    """

    _index: _Index | None = None

    def changed(self, put: Iterable[BufferRecord] = (), gone: Iterable[str] = ()) -> Buffers:
        """Return the records with those of `put`, each under its key, and without the keys in `gone`."""
        made = Buffers(self)
        put, gone = list(put), list(gone)
        before = [self[key] for key in {*gone, *(record.key for record in put)} if key in self]
        for key in gone:
            made.pop(key, None)
        for record in put:
            made[record.key] = record
        if self._index is not None:
            made._index = self._index.changed(before, put)
        return made

    def at(self, server: str) -> Iterable[BufferRecord]:
        """Return the records with a copy on the server, also one that is being made."""
        return self._indices().by_server.get(server, _NONE).values()

    def servers(self) -> Iterable[str]:
        """Return the servers that some record names."""
        return self._indices().by_server.keys()

    @property
    def copies_wrong(self) -> bool:
        """Whether some record has a copy too few or too many."""
        return bool(self._indices().copies_wrong)

    def with_id(self, buffer_id: int) -> BufferRecord | None:
        """Return the record with that id."""
        key = self._indices().keys.get(buffer_id)
        return None if key is None else self[key]

    def mirrors_of(self, buffer_id: int) -> list[BufferRecord]:
        """Return the mirrors of the buffer with that id."""
        return [self[key] for key in sorted(self._indices().mirrors.get(buffer_id, ()))]

    def _indices(self) -> _Index:
        if self._index is None:
            self._index = _Index.of(self.values())
        return self._index

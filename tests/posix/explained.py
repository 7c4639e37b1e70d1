"""CPython's tests that fail in a mount and not in memory, each with the reason; docs/files.md has the same reasons."""

from __future__ import annotations

_ONE_NAME = "a buffer has one name, so hard links are refused"
_NO_PIPES = "a buffer cannot be a pipe"
_DENSE = "a hole takes memory like any bytes, so a file of 2 GiB has no room"

# By class and name of the test: modules have other names in other versions of Python.
EXPLAINED = {
    "PathTest.test_hardlink_to": _ONE_NAME,
    "PosixPathTest.test_hardlink_to": _ONE_NAME,
    "TestExtractionFilters.test_pipe": _NO_PIPES,
    "CIOTest.test_large_file_ops": _DENSE,
    "PyIOTest.test_large_file_ops": _DENSE,
}

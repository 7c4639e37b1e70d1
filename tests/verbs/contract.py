"""The tests of every transport that `make verbs` also runs over verbs, and those that it does not, with the reason.

Paths as pytest takes them: files, or single tests. What a file has for other transports only is skipped there, by name.
"""

from __future__ import annotations

OVER_VERBS = (
    "tests/integration/test_api.py",
    "tests/integration/test_apply.py",
    "tests/integration/test_barriers.py",
    "tests/integration/test_direct.py",
    "tests/integration/test_exact_sums.py",
    "tests/integration/test_exactly_once.py",
    "tests/integration/test_locks.py",
    "tests/integration/test_publish.py",
    "tests/integration/test_versions.py",
    "tests/integration/test_wire.py",
)

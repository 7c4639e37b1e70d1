"""memserver.copier: new copies of segments."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import Mock

from memserver.copier import Copier
from memserver.engine import CopyState


def test_a_copy_of_a_later_epoch_is_not_given_up() -> None:
    """Whose server was found away was of before: a copy that was begun meanwhile was given up for it."""
    ours = Copier.__new__(Copier)
    ours._lock, ours._engine = threading.Condition(), Mock()  # type: ignore[assignment]
    ours._ended = Mock()  # type: ignore[method-assign]
    ours._copies = {2: SimpleNamespace(epoch=6, state=CopyState.BUSY)}  # type: ignore[dict-item]
    assert not ours.give_up(2, 5)
    assert not ours.give_up(3, 5)
    ours._engine.abandon_copy.assert_not_called()
    assert ours.give_up(2, 6)
    ours._engine.abandon_copy.assert_called_once_with(2, 6)

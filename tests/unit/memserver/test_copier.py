"""memserver.copier: new copies of segments."""

from __future__ import annotations

from unittest.mock import Mock

from memserver.copier import Copier
from memserver.engine import CopyStep


def test_a_copy_of_a_later_epoch_is_not_given_up() -> None:
    """Whose server was found away was of before: a copy that was begun meanwhile was given up for it."""
    engine = Mock()
    engine.copy.return_value = CopyStep.BUSY, 10, 100
    ours = Copier(engine, 0, Mock(), begin=Mock())
    ours.want({2: 6})
    ours.turn()
    assert not ours.give_up(2, 5)
    assert not ours.give_up(3, 5)
    engine.abandon_copy.assert_not_called()
    assert ours.give_up(2, 6)
    engine.abandon_copy.assert_called_once_with(2, 6)
    assert [one.failed for one in ours.progress()] == [True]

"""memserver.copier: new copies of segments."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from memserver.copier import Copier
from memserver.replication import PRIMARY
from tests.unit.memserver.test_segments import FORM, Run


def test_a_copy_of_a_later_epoch_is_not_given_up(tmp_path: Path) -> None:
    """Whose server was found away was of before: a copy that was begun meanwhile was given up for it."""
    with ExitStack() as leaving:
        run = Run(tmp_path, leaving)
        made = replace(FORM, epoch=6)

        def replicate() -> None:
            """To a server that is not there: the copy stays on its way."""
            run.engine.copies.set_replica(made.id, made.epoch, PRIMARY, "b", copying=True)

        run.segments.create(made, replicate=replicate)
        news: list[bool] = []
        # the test takes the turns
        ours = Copier(run.engine, 0, lambda: news.append(True), begin=lambda run, name: None)
        ours.want({made.id: made.epoch})
        ours.turn()
        assert not ours.give_up(made.id, made.epoch - 1)
        assert not ours.give_up(made.id + 1, made.epoch - 1)
        assert ([one.failed for one in ours.progress()], news) == ([False], [])
        assert ours.give_up(made.id, made.epoch)
        assert ([one.failed for one in ours.progress()], news) == ([True], [True])

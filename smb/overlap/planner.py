"""When a training gets a new plan of its exchanges, and which one. Pure: no clock, no call, no PyTorch.

The first steps exchange without a plan and are measured. Then plan.py picks the parts. Some steps follow the new plan,
some go without overlap, and the faster way is kept, because a prediction does not know which other programs use a
host's processors. After twice as many steps, a new plan is made if the measurements have changed.
"""

from __future__ import annotations

from smb.overlap.parts import Cut
from smb.overlap.plan import ExchangePlan, Measured, plan_of

LEARNING_STEPS = 4  # exchanged before the first plan; the first step, which warms up, is not measured
COMPARED_STEPS = 20  # steps with a new plan, and as many without overlap, before the faster way is kept


class Planner:
    """The plans of one training. Steps are counted by finished exchanges."""

    def __init__(self, asked: str) -> None:
        """`asked` is the most overlap that a plan may have: "forward" or "both"."""
        self.plan: ExchangePlan | None = None  # None while the first steps are measured
        self._asked = asked
        # The plan with overlap, while it is compared with an exchange without overlap.
        self._compared: ExchangePlan | None = None
        self._next_at = 0  # the step after which a new plan may be due

    @property
    def overlap(self) -> str:
        """The overlap of the present plan: "none", "forward" or "both"."""
        return "none" if self.plan is None else self.plan.chosen.overlap

    @property
    def cut(self) -> Cut | None:
        """The parts of the present plan."""
        return None if self.plan is None else self.plan.cut

    @property
    def comparing(self) -> bool:
        """True while two ways are being compared."""
        return self._compared is not None

    def hopeless(self, steps: int, measured: Measured) -> bool:
        """Return True if this many steps gave no measurements for a plan, because the model's
        modules are not called.
        """
        return self.plan is None and steps == 2 * LEARNING_STEPS and not measured.ready

    def due(self, steps: int, measured: Measured) -> bool:
        """Return True if `advance` must be called after this many steps. If not, the next check may be put off."""
        if self.plan is None:
            return steps >= LEARNING_STEPS and measured.ready
        if steps < self._next_at:
            return False
        if self._compared is None and not measured.outdated(self.plan):
            self._next_at += COMPARED_STEPS
            return False
        return True

    def advance(self, steps: int, measured: Measured, way: str) -> str:
        """Make the next plan and return a line for the log; "" if there is nothing to say.

        A plan with overlap is followed by one without, and then by the faster one. `way` is how the scheme moves values
        (smb/train/traits.py).
        """
        compared, news = self._compared, ""
        self._next_at = steps + COMPARED_STEPS
        if compared is None:
            self.plan = _plan(measured, way, self._asked)
            news = str(self.plan)
            if self.plan.chosen.overlap != "none":
                self._compared = self.plan
            else:
                self._next_at = max(self._next_at, 2 * steps)
        elif self.plan is compared:
            self.plan = _plan(measured, way, "none")
        else:
            with_s, without_s = (measured.step_s(overlapped=each) for each in (True, False))
            self.plan = compared if with_s <= without_s else _plan(measured, way, "none")
            self._compared, self._next_at = None, 2 * steps
            news = (
                f"a step took {1e3 * with_s:.1f} ms with overlap {compared.chosen.overlap!r} and "
                f"{1e3 * without_s:.1f} ms without: overlap {self.plan.chosen.overlap!r} from here on"
            )
        return news


def _plan(measured: Measured, way: str, overlap: str) -> ExchangePlan:
    return plan_of(measured.layer_runs, measured.layers(), measured.channel(), way, measured.closing_s(), overlap)

"""What the log of a framework says of a training's exchanges: hf.py, lightning.py and accelerate.py add it. It uses
what smb.torch.join returns.
"""

from __future__ import annotations

import smb.train
from smb.torch.training.shared_model import Shared


class ExchangeLog:
    """The values of this process's last exchange, for the next record of a log. At a mesh's ranks other than 0 there
    are none.
    """

    def __init__(self, shared: Shared) -> None:
        self.values: dict[str, float] = {}  # ExchangeEvent.scalars() of the last exchange
        self._taken = True
        shared.on_exchange(self._note)

    def _note(self, event: smb.train.ExchangeEvent) -> None:
        self.values, self._taken = event.scalars(), False

    def take(self) -> dict[str, float]:
        """Return the values of the last exchange, or {} if an earlier call has returned them."""
        if self._taken:
            return {}
        self._taken = True
        return dict(self.values)

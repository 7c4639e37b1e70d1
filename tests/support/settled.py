"""The last module that a server of forks imports: what is there by now stays, so its forks' collectors of garbage need
not look through all of PyTorch, nor write to memory that they share.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()

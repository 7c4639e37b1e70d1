"""The room of training data: rows of buffers, and samples of tar files, for torch.utils.data.DataLoader.

This package uses clients and buffers by their public interface, and files by fsspec, where our filesystem is
registered. Users import it, and no module of ours does.
"""

from smb.torch.data.rows import Rows
from smb.torch.data.shards import Shards

__all__ = ["Rows", "Shards"]

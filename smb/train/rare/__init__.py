"""The room of rare schemes: R2SP, where workers take turns on a slow link, and HSGD, with groups of hosts. They use
smb.train's parts for all schemes, and clients and buffers by their public interface. smb.train imports the two names
here.
"""

from smb.train.rare.hsgd import HSGD
from smb.train.rare.r2sp import R2SP

__all__ = ["HSGD", "R2SP"]

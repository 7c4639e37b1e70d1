"""The room of rare schemes: R2SP, where workers take turns on a slow link, and HSGD, hosts inside hosts. They use what
smb.train has for every scheme, and clients and buffers by their public face; smb.train imports their two names here.
"""

from smb.train.rare.hsgd import HSGD
from smb.train.rare.r2sp import R2SP

__all__ = ["HSGD", "R2SP"]

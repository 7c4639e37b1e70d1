"""The room of `smb bench`: it measures how fast a buffer is, beside the limit of the memory or of a bare socket in the
same run.

It uses clients and buffers by their public interface; the command smb/tools/cli/bench.py imports it.
"""

from smb.tools.bench.measure import Measurement
from smb.tools.bench.run import BenchConfig, run_bench

__all__ = ["BenchConfig", "Measurement", "run_bench"]

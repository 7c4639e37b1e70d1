"""How fast a buffer is, beside the limit that memory or a bare socket sets, measured in the same run."""

from smb.tools.bench.measure import Measurement
from smb.tools.bench.run import BenchConfig, run_bench

__all__ = ["BenchConfig", "Measurement", "run_bench"]

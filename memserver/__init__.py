"""The memory server: one daemon that owns memory up to its capacity and serves segments in it.

The data plane is the C engine, whose threads run no Python. This package has the daemon's life cycle (`daemon`) and the
control service for the coordinator (`control`). `segments` knows which segments are held, and `recovery` finds them
again after a restart. `registration` reports them to the coordinator, `metrics` to Prometheus. Only `engine` touches
the C library.
"""

import os

# gRPC reads this when it is imported. Otherwise its C library would log the same failures before our own messages.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

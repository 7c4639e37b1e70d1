"""The memory server: one daemon that owns memory up to its capacity and serves segments of it.

The data plane is the C engine's: its threads touch nothing of Python. Here are its life cycle (`daemon`) and the
control service for the coordinator (`control`). `segments` has what is held, `recovery` finds it again after a restart.
`registration` reports it to the coordinator, `metrics` to Prometheus. Only `engine` touches the C library.
"""

import os

# Read as gRPC is imported: without it, lines of its C library stand before our own sentence, which says the same.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

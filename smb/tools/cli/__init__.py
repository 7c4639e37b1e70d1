"""The command line: `smb`. One command a file."""

import os

# Read as gRPC is imported: without it, lines of its C library stand before our own sentence, which says the same.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

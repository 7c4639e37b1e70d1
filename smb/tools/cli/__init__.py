"""The command line: `smb`. Each command has a file."""

import os

# Set before gRPC is imported: otherwise its C library prints lines before the command's own message, which says the
# same.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

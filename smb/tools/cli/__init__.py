"""The room of commands: `smb`, a file for each command. A command uses what users import, `connection` for RPCs that
clients do not make, and the other rooms, each from the file of its command. The package's entry point names `main`.
smb-memserver (memserver/cli.py) imports how options are read and results are printed; no other code imports this room.
"""

import os

# Set before gRPC is imported: otherwise its C library prints lines before the command's own message, which says the
# same.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

"""The relay of a memory server: a process that fills the mirrors on that server (docs/decisions.md, 0026).

The memory server starts it as `python -m smb.relay COORDINATOR SERVER`. It is an ordinary client of the cluster.
"""

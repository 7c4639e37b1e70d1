"""The relay of a memory server: fills the mirrors that lie there (docs/decisions.md, 0026).

`python -m smb.relay COORDINATOR SERVER`, started by the memory server. It is a client like others.
"""

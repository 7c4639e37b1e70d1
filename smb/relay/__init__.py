"""The room of publishing: here the relay of a memory server, a process that fills the mirrors on that server
(docs/decisions.md, 0026); in smb.torch the publisher and the follower of states.

The memory server starts the relay as `python -m smb.relay COORDINATOR SERVER`. It is an ordinary client of the cluster.
The room uses the versions of smb.call and the engine's sums and deltas, beside what clients use.
"""

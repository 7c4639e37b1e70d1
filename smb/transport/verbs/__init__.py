"""The room of RDMA: one-sided reads and writes, and requests by reference.

This transport uses the engine and what smb.transport offers to every transport. smb.transport.choose imports it for a
client. Its other half, in a memory server, is memserver/rdma_target.py, which the daemon imports. It needs pyverbs,
which is a package of Linux distributions but not of PyPI, so there is no extra; `devices` names what is missing, also
for `smb doctor`.
"""

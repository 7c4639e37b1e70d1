"""The room of RDMA: one-sided reads and writes, and requests by reference. It is a transport: it uses the engine and
what smb.transport has for every transport. smb.transport.choose imports it for a client; its other half, in a memory
server, is memserver/rdma_target.py, which the daemon imports. It needs pyverbs, which Linux distributions have and PyPI
has not, so there is no extra; smb/transport/devices.py says what is missing without it.
"""

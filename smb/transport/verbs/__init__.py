"""RDMA: one-sided reads and writes, and requests by reference."""

"""The memory server: one daemon that owns memory up to its capacity and serves segments of it.

The data plane is the C engine's: its threads touch nothing of Python. Here are its life cycle (`daemon`), the control
service for the coordinator (`control`), what is held (`segments`), found again after a restart (`recovery`), told to
the coordinator (`registration`) and to Prometheus (`metrics`). Only `engine` touches the C library.
"""

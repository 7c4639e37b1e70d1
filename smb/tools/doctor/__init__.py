"""`smb doctor`: what on this machine, and between it and a cluster, is in the way; and what to change."""

from smb.tools.doctor.findings import Finding, Severity
from smb.tools.doctor.machine import look_at_machine
from smb.tools.doctor.reach import look_at_cluster, somebody_listens

__all__ = ["Finding", "Severity", "look_at_cluster", "look_at_machine", "somebody_listens"]

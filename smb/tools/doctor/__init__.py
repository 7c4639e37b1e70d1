"""`smb doctor`: problems on this machine and on the path to a cluster, with advice."""

from smb.tools.doctor.findings import Finding, Severity
from smb.tools.doctor.machine import look_at_machine
from smb.tools.doctor.reach import look_at_cluster, somebody_listens

__all__ = ["Finding", "Severity", "look_at_cluster", "look_at_machine", "somebody_listens"]

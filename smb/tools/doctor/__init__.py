"""The room of `smb doctor`: problems on this machine and on the path to a cluster, with advice.

It looks at what a client would choose, so it uses smb.transport and smb.security, too; the command
smb/tools/cli/doctor.py imports it.
"""

from smb.tools.doctor.findings import Finding, Severity
from smb.tools.doctor.machine import look_at_machine
from smb.tools.doctor.reach import look_at_cluster, somebody_listens

__all__ = ["Finding", "Severity", "look_at_cluster", "look_at_machine", "somebody_listens"]

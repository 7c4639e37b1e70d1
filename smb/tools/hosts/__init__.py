"""The room of daemons and programs on several hosts over ssh, for `smb up --hosts` and `smb run`.

On each host one process (there.py) starts what it gets on its standard input, keys included, and ends it when that
input ends or falls silent. So nothing goes on after Ctrl-C, after the end of this process, or after a lost connection.
"""

from smb.tools.hosts.cluster import HostsCluster
from smb.tools.hosts.names import bare, check_servers, hosts_of
from smb.tools.hosts.programs import run_on
from smb.tools.hosts.remote import Ssh

__all__ = ["HostsCluster", "Ssh", "bare", "check_servers", "hosts_of", "run_on"]

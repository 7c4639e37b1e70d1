"""The room of moves: it replaces lost copies, empties drained servers, and moves copies and roles where an operator or
the balance wants them. It uses the coordinator's records, its commit log and its calls to memory servers. `leader`
starts its two tasks, and the service answers operators by `requests`.

`wanted_copies`, `copy_pace`, `primaries` and `rebalance` decide (pure), `move` and `audit` describe what was decided,
`copy_maker` does it, and `balancer` asks for switches of roles by itself. Which copies a buffer has, and who becomes
primary after a loss, is the core's: smb/coordinator/replicas.py, replica_role_changes.py and steps/copies.py.
"""

"""The room of etcd: it keeps a coordinator's records there, and elects one of several coordinators as the leader. It
uses what the coordinator offers to any store and any leader, and nothing of a client. `process` imports `contender` if
--state begins with etcd://, and `smb coordinator migrate` imports `migrate`. Its extra is `etcd`.

`connection` calls etcd, `election` decides who leads, `store` keeps the records, `contender` stands by and leads in
turn, `migrate` moves records from one kind of store to the other.
"""

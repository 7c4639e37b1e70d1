"""The room of etcd: a coordinator's records in etcd, and which of several coordinators leads. It uses what the
coordinator has for any store and any leader, and nothing of a client; `process` imports `contender` where --state
begins with etcd://, `smb coordinator migrate` imports `migrate`. Its extra is `etcd`.

`connection` calls etcd, `election` decides who leads, `store` keeps the records, `contender` stands by and leads in
turn, `migrate` moves records from one kind of store to the other.
"""

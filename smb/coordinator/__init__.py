"""The coordinator knows names, layouts, liveness and leases. It is never on the data path.

Data flow: `service` (gRPC) turns a request into an event, and `commit_log` commits it: `state` decides, `store` stores.
Then `service` executes the resulting effects at the memory servers (`memserver_client`), and `session_end_notifier`
tells them which sessions have ended. `placement`, `leases`, `replicas` and `state` are pure.
`leader` has the parts that work while this coordinator leads. With records in etcd, `etcd.contender` waits until it is
elected (`etcd.election`).
"""

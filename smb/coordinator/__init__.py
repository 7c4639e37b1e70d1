"""The coordinator: names, layouts, liveness and leases. It is never on the data path.

Data flow: `service` (gRPC) turns a request into an event, `commit log` commits it (`state` decides, `store` remembers),
`service` does what the resulting effects ask of the memory servers (`peers`), `endings` tells them which sessions are
over. `placement`, `leases`, `sessions` and `state` are pure.
"""

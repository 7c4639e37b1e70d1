"""The coordinator's records in etcd, and which of several coordinators leads: connection, then lead, then store."""

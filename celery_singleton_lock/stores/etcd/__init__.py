"""The etcd store."""

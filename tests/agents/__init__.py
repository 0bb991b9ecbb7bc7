"""Monitoring agents of other people, each started as its manual says: `make test-agents`."""

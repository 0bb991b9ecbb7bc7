"""Locks on one Redis or Valkey server, behind Sentinel, or in a Redis Cluster."""

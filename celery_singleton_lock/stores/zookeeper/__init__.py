"""The ZooKeeper store."""

"""The stores of leases, each opened by its URL."""

from .schemes import is_sentinel_url, is_store_url, open_store, shards_of, with_tls

__all__ = ["is_sentinel_url", "is_store_url", "open_store", "shards_of", "with_tls"]

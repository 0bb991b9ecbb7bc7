-- The keys of a shard whose queues are not empty.
-- KEYS: due set
-- Reply: the keys
return redis.call('ZRANGE', KEYS[1], 0, -1)

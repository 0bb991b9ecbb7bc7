-- The number of calls before one in the queue of a key.
-- KEYS: queue. ARGV: task
-- Reply: the number; false: it has no place
return redis.call('ZRANK', KEYS[1], ARGV[1])

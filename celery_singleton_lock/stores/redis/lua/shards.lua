-- Store the number of shards of a prefix, unless it is stored.
-- KEYS: the key that stores the number
-- ARGV: the number of shards
-- Reply: the stored number
local written = redis.call('GET', KEYS[1])
if written then return written end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]

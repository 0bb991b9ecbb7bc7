-- Write down how many shards a prefix has, unless somebody did.
-- KEYS: where it is written
-- ARGV: the number
-- Reply: the number that is written there
local written = redis.call('GET', KEYS[1])
if written then return written end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]

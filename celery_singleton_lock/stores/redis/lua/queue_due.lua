-- The keys of a shard whose time for a look has come.
-- KEYS: due set. ARGV: the most keys
-- Reply: the keys
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local keys = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])
if #keys > 0 then return keys end
-- A time that no deadline or ttl reaches: the server's clock was set back.
return redis.call('ZRANGEBYSCORE', KEYS[1], now + 8 * 86400000, '+inf', 'LIMIT', 0, ARGV[1])

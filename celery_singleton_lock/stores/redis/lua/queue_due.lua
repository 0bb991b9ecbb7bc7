-- The keys of a shard whose time for a sweep has come.
-- KEYS: due set. ARGV: the most keys
-- Reply: the keys; if there are more, a part of them at random: those that can't be read stay the first
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local most = tonumber(ARGV[1])
local keys = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, most)
if #keys == most then
  local parts = math.ceil(redis.call('ZCOUNT', KEYS[1], '-inf', now) / most)
  local first = time[2] % parts * most
  if first > 0 then keys = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', first, most) end
end
if #keys > 0 then return keys end
-- A time that no deadline or ttl reaches: the server's clock was set back.
return redis.call('ZRANGEBYSCORE', KEYS[1], now + 8 * 86400000, '+inf', 'LIMIT', 0, ARGV[1])

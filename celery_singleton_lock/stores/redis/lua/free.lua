-- Free a key of any kind for an operator. Raises the fence, so the old holder's writes can be refused.
-- KEYS: key, fence counter
-- ARGV: token that must hold the key ('' any)
-- Replies: 1 freed, 0 the key is free or another token holds it
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
if ARGV[1] ~= '' and string.match(value, '^%a (%S+) ') ~= ARGV[1] then return 0 end
local now = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
redis.call('SET', KEYS[2], string.format('%.0f', math.max(now[1] * 1000000 + now[2], last + 1)))
redis.call('DEL', KEYS[1])
return 1

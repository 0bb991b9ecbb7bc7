-- An operator frees a key of any kind; the fence rises, so the old holder's writes can be refused.
-- KEYS: key, fence counter
-- ARGV: token that must stand ('' whichever does)
-- Reply: 1 freed, 0 nothing there or another token
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
if ARGV[1] ~= '' and string.match(value, '^%a (%S+) ') ~= ARGV[1] then return 0 end
local now = redis.call('TIME')
local last = tonumber(redis.call('GET', KEYS[2]) or '0')
redis.call('SET', KEYS[2], string.format('%.0f', math.max(now[1] * 1000000 + now[2], last + 1)))
redis.call('DEL', KEYS[1])
return 1

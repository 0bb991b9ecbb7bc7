-- Return the remains of a lease that a release did not find.
-- KEYS: lease, fence counter
-- Reply: the key's value (false: none, or not a string), its ttl in ms, the fence counter ('0' none),
--        server time in us
local value, now = redis.pcall('GET', KEYS[1]), redis.call('TIME')
if type(value) ~= 'string' then value = false end
local time = string.format('%.0f', now[1] * 1000000 + now[2])
return {value, redis.call('PTTL', KEYS[1]), redis.call('GET', KEYS[2]) or '0', time}

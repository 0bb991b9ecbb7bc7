-- Return the remains of a lease that a release did not find.
-- KEYS: lease, the shard's hash
-- Reply: the key's value (false: none, or not a string), its ttl in ms, the last fence ('0' none),
--        server time in us
local value, now = redis.pcall('GET', KEYS[1]), redis.call('TIME')
if type(value) ~= 'string' then value = false end
local time = string.format('%.0f', now[1] * 1000000 + now[2])
return {value, redis.call('PTTL', KEYS[1]), redis.call('HGET', KEYS[2], '|fence') or '0', time}

-- Free a key of any kind for an operator. Raises the fence, so the old holder's writes can be refused.
-- KEYS: key, the shard's hash [, the operator's note]
-- ARGV: token that must hold the key ('' any); with a note: its JSON, its ttl in ms
-- Replies: 1 freed, 0 the key is free or another token holds it
local value = redis.call('GET', KEYS[1])
if not value then return 0 end
local token = string.match(value, '^%a (%S+) ') or ''
if ARGV[1] ~= '' and token ~= ARGV[1] then return 0 end
local now = redis.call('TIME')
local last = tonumber(redis.call('HGET', KEYS[2], '|fence') or '0')
redis.call('HSET', KEYS[2], '|fence', string.format('%.0f', math.max(now[1] * 1000000 + now[2], last + 1)))
if KEYS[3] then redis.call('SET', KEYS[3], token .. ' ' .. ARGV[2], 'PX', ARGV[3]) end
redis.call('DEL', KEYS[1])
return 1

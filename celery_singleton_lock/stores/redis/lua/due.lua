-- Return how long a message must wait whose arguments are in another shard than its lease; see arguments.lua.
-- KEYS: arguments of the message
-- Reply: ms until the message is due; 0 it is due
local first, due = string.match(redis.call('GET', KEYS[1]) or '', '^(%d+) (%d+) ')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if not first or now < tonumber(first) then return 0 end -- the server's clock was set back
return math.max(due - now, 0)

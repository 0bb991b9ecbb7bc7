-- What waits in the queues of some keys.
-- KEYS: queue, its calls; queue, its calls ...
-- Reply: for each queue {the number of calls without one at the head that has begun, the number of the first of them}
local reply = {}
for i = 1, #KEYS, 2 do
  local found = redis.call('ZRANGE', KEYS[i], 0, 1, 'WITHSCORES')
  local begun = found[1] and string.find(redis.call('HGET', KEYS[i + 1], '=' .. found[1]) or '', '^[bo]')
  reply[#reply + 1] = {redis.call('ZCARD', KEYS[i]) - (begun and 1 or 0), found[begun and 4 or 2]}
end
return reply

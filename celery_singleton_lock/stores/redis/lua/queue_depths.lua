-- What waits in the queues of some keys.
-- KEYS: queue, its calls; queue, its calls ...
-- Reply: for each queue {the number of calls without those that run, the number of the first of them}
local reply = {}
for i = 1, #KEYS, 2 do
  local limit = tonumber(string.match(redis.call('HGET', KEYS[i + 1], '|limit') or '1', '^%d+'))
  local found, first = redis.call('ZRANGE', KEYS[i], 0, limit, 'WITHSCORES'), nil
  local waiting = redis.call('ZCARD', KEYS[i])
  for j = 1, #found, 2 do
    local runs = j < 2 * limit and string.find(redis.call('HGET', KEYS[i + 1], '=' .. found[j]) or '', '^[bo]')
    if runs then waiting = waiting - 1 else first = first or found[j + 1] end
  end
  reply[#reply + 1] = {waiting, first}
end
return reply

-- Prolong each lease whose token still stands; never a reservation or a cooling key.
-- KEYS: lease, lease ...
-- ARGV: token of the first, its ttl in ms, token of the second, its ttl in ms ...
-- Replies: one number a key: 1 renewed, 0 expired, -1 replaced
local replies = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key) -- a table: somebody's list, which must not fail the others
  local lease = 'l ' .. ARGV[2 * i - 1] .. ' '
  if not value then replies[i] = 0
  elseif type(value) == 'string' and string.sub(value, 1, #lease) == lease then
    redis.call('PEXPIRE', key, ARGV[2 * i])
    replies[i] = 1
  else replies[i] = -1 end
end
return replies

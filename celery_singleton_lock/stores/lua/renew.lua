-- Prolong each lease whose token still stands; never a reservation or a cooling key.
-- KEYS: lease, lease ...
-- ARGV: token of the first, its ttl in ms, token of the second, its ttl in ms ...
-- Replies: one number a key: 1 renewed, 0 expired, -1 replaced, 2 its process is being killed
local replies = {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key) -- a table: somebody's list, which must not fail the others
  local token = ' ' .. ARGV[2 * i - 1] .. ' '
  local ours = type(value) == 'string' and string.sub(value, 2, #token + 1) == token
  local kind = ours and string.sub(value, 1, 1)
  if kind == 'l' then
    redis.call('PEXPIRE', key, ARGV[2 * i])
    replies[i] = 1
  elseif kind == 'd' then replies[i] = 2
  else replies[i] = value and -1 or 0 end
end
return replies

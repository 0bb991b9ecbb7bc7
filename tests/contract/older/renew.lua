-- Prolong each lease whose token still stands, and its claim with it; never a reservation, a cooling
-- key, or the claim of a lease that was given back meanwhile: that has a ttl of its own.
-- KEYS: lease, lease ... and behind them the claims of some of these
-- ARGV: number of leases, then for each key: token of the lease (a claim's: of its lease), ttl in ms
-- Replies: one number a key: 1 renewed, 0 expired, -1 replaced, 2 its process is being killed
local replies, renewed, leases = {}, {}, tonumber(ARGV[1])
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key) -- a table: somebody's list, which must not fail the others
  local token, ttl = ARGV[2 * i], ARGV[2 * i + 1]
  local text = type(value) == 'string' and value or ''
  local ours = ' ' .. token .. ' ' -- not matched: a pattern takes as long as all else together
  replies[i] = value and -1 or 0
  if i > leases then
    local held = string.match(text, '^q (%S+) ')
    local claimed = held and renewed[token] and string.match(token, '^[^|]+') == held
    if claimed and redis.call('PTTL', key) < tonumber(ttl) then redis.call('PEXPIRE', key, ttl) end
  elseif string.sub(text, 1, #ours + 1) == 'l' .. ours then
    redis.call('PEXPIRE', key, ttl)
    replies[i], renewed[token] = 1, true
  elseif string.sub(text, 1, #ours + 1) == 'd' .. ours then replies[i] = 2 end
end
return replies

-- Prolong each lease whose token still stands, and its claim with it; never a reservation, a cooling
-- key, or the claim of a lease that was given back meanwhile: that has a ttl of its own.
-- KEYS: lease, lease ... and behind them the claims of some of these
-- ARGV: number of leases, then for each key: token of the lease (a claim's: of its lease), ttl in ms
-- Replies: one number a key: 1 renewed, 0 expired, -1 replaced, 2 its process is being killed
local replies, renewed = {}, {}
for i, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key) -- a table: somebody's list, which must not fail the others
  local token, ttl = ARGV[2 * i], tonumber(ARGV[2 * i + 1])
  local kind, held = string.match(type(value) == 'string' and value or '', '^(%a) (%S+) ')
  replies[i] = value and -1 or 0
  if i > tonumber(ARGV[1]) then
    local claimed = kind == 'q' and renewed[token] and string.match(token, '^[^|]+') == held
    if claimed and redis.call('PTTL', key) < ttl then redis.call('PEXPIRE', key, ttl) end
  elseif kind == 'l' and held == token then
    redis.call('PEXPIRE', key, ttl)
    replies[i], renewed[token] = 1, true
  elseif kind == 'd' and held == token then replies[i] = 2 end
end
return replies

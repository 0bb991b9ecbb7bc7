-- Prolong each lease whose token still stands, and its claim with it; never a reservation, a cooling
-- key, or the claim of a lease that was given back meanwhile: that has a ttl of its own.
-- KEYS: lease, lease ... and behind them the claims of some of these
-- ARGV: number of leases, ttl in ms of all keys ('': see below), how each lease's value begins while
--       it stands ('l', its token, blanks between and behind), for each claim the place of its lease;
--       and if the ttls differ, that of each key
-- Replies: two numbers for each lease that isn't renewed: its place, and 0 expired, -1 replaced,
--          2 its process is being killed
local find, get, call = string.find, redis.pcall, redis.call -- each key counts
local keys, words = KEYS, ARGV
local leases, ttl = tonumber(words[1]), words[2] ~= '' and words[2]
local replies, failed = {}, {}
-- All values at once save an eighth. Asked for first, without a trace in the log of denials: a
-- login may lack MGET (then each is read by GET), and an old server can't tell.
local knows, may = pcall(redis.acl_check_cmd, 'MGET', keys[1])
local values = knows and may and get('MGET', unpack(keys)) or {}
for i = 1, leases do
  local value, ours = values[i] or get('GET', keys[i]), words[i + 2]
  local is_text = type(value) == 'string' -- a table: a foreign list, which must not fail the others
  if is_text and find(value, ours, 1, true) == 1 then -- no pattern: that takes twice as long
    call('PEXPIRE', keys[i], ttl or words[#keys + 2 + i])
  else
    local dying = is_text and find(value, 'd' .. string.sub(ours, 2), 1, true) == 1
    replies[#replies + 1], replies[#replies + 2] = i, dying and 2 or value and -1 or 0
    failed[i] = true
  end
end
for i = leases + 1, #keys do
  local place, value = tonumber(words[i + 2]), values[i] or get('GET', keys[i])
  local held = type(value) == 'string' and string.match(value, '^q (%S+) ')
  local claimed = held and not failed[place] and string.match(words[place + 2], '^l ([^|]+)') == held
  local longer = ttl or words[#keys + 2 + i]
  if claimed and call('PTTL', keys[i]) < tonumber(longer) then call('PEXPIRE', keys[i], longer) end
end
return replies

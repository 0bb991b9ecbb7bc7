-- Prolong each lease that its token still holds, and the lease's claim. Do not prolong a reservation, a
-- cooling key, or the claim of a lease that was released meanwhile: these have their own ttl.
-- KEYS: lease, lease ..., then the claims of some of these leases
-- ARGV: number of leases, ttl in ms of all keys ('': see below), for each lease the prefix of its value
--       while it is held ('l <token> '), for each claim the index of its lease; if the ttls differ, the
--       ttl of each key
-- Reply: two numbers for each lease that was not renewed: its index, and 0 expired, -1 replaced,
--        2 its process is being killed
local find, get, call = string.find, redis.pcall, redis.call -- local names are faster: this runs per key
local keys, words = KEYS, ARGV
local leases, ttl = tonumber(words[1]), words[2] ~= '' and words[2]
local replies, failed = {}, {}
-- MGET saves an eighth of the time. A login may lack the right to MGET; then each value is read by GET.
-- acl_check_cmd tests the right without an entry in the ACL log; older servers do not have the function.
local knows, may = pcall(redis.acl_check_cmd, 'MGET', keys[1])
local values = knows and may and get('MGET', unpack(keys)) or {}
for i = 1, leases do
  local value, ours = values[i] or get('GET', keys[i]), words[i + 2]
  local is_text = type(value) == 'string' -- an error table for a foreign list: must not fail the others
  if is_text and find(value, ours, 1, true) == 1 then -- plain search: a pattern takes twice as long
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

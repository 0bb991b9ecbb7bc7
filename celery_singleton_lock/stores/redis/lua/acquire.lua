-- Take a free slot, or a slot that the token holds already or that is reserved for it.
-- KEYS: the shard's hash, completion record of this attempt, slot, slot ..., the message's claim if it has
--       one, and the key's wait queue if ARGV[10] is given
-- ARGV: token, ttl in ms, sequence, holder as JSON, fence base; with a claim or a wait queue: the
--       claim's phase after a grant ('' freed, '-' no claim), '1' if a refusal by another task ends the
--       message, '1' if another task's claim refuses the lease, '1' if a grant leaves the claim unchanged;
--       with a wait queue: ms to wait if another token has the key ('0' leaves the queue), the handoff
--       token that woke the client ('' none)
-- Replies: granted, one slot: the fence; granted, several slots (they have no fence): {'granted', slot};
--          refused: {relation [, slot, value, ttl left in ms [, other slot, value ...]]}; of more than
--          eight slots, the eight that expire first; {'paused', name, text, ms left (-1: it does not end)};
--          {'rate', ms until a call may start}
local completion = redis.call('GET', KEYS[2])
if completion then
  local state, sequence = string.match(completion, '^(%S) (%d+) ')
  if state == 'd' then return {'done'} end
  if state == 'f' then return {'duplicate'} end
  if sequence and tonumber(sequence) > tonumber(ARGV[3]) then return {'superseded'} end
end
local queue = ARGV[10] and table.remove(KEYS)
local claim = ARGV[6] and ARGV[6] ~= '-' and table.remove(KEYS)
local id, nesting, retries, nonce -- parsed only when they are needed
local function read_token() return string.match(ARGV[1], '^([^|]+)|(%d+)%.(%d+)|(.*)$') end
if claim or queue then id, nesting, retries, nonce = read_token() end
local chosen, taken, own, mine
for i = 3, #KEYS do
  local value = redis.call('GET', KEYS[i])
  if not value then chosen = chosen or KEYS[i] else
    if not id then id, nesting, retries, nonce = read_token() end
    taken = taken or {}
    taken[i] = value
    local kind, t, n, r, c = string.match(value, '^(%a) ([^| ]+)|(%d+)%.(%d+)|(%S*) ')
    if t == id then
      local age = (n - nesting) * 2e9 + r - retries -- nesting and retries are below 1e9
      if age > 0 then own = {'later', KEYS[i], value}
      elseif kind == 'c' then own = nil -- min_hold applies to all
      elseif age < 0 then own = {'earlier', KEYS[i], value}
      elseif kind == 'r' or (kind == 'l' and c == nonce) then chosen, mine = KEYS[i], kind; break
      else own = {'duplicate', KEYS[i], value} end
      if own then break end
    elseif t == '%waiter' and c == ARGV[11] then chosen = KEYS[i] end -- reserved for the woken client
  end
end
local refused = own
if not own and not chosen then
  -- All holders of a high limit would be 100 kB per reply. The leases that expire first are those that are
  -- not renewed any more, so the leases of dead processes are among them.
  local first, left = {}, {}
  for i = 3, #KEYS do
    local ttl, place = 0, #first + 1
    if #KEYS > 10 then
      ttl = redis.call('PTTL', KEYS[i])
      if string.byte(taken[i]) ~= 108 then ttl = ttl + 2^53 end -- 'l': only a lease is renewed
      while place > 1 and ttl < left[place - 1] do place = place - 1 end
    end
    if place < 9 then
      table.insert(first, place, i)
      table.insert(left, place, ttl)
      first[9], left[9] = nil, nil
    end
  end
  refused = {'other', KEYS[first[1]], taken[first[1]], 0}
  for i = 2, #first do refused[2 * i + 1], refused[2 * i + 2] = KEYS[first[i]], taken[first[i]] end
end
local last, pauses, pause
if not own then
  last, pauses = unpack(redis.call('HMGET', KEYS[1], '|fence', '|pauses')) -- see shard_pauses.lua
  pause = pauses and mine ~= 'l' and shard_pauses(KEYS[1]).of(KEYS[3])
end
if claim and ARGV[8] == '1' and (not refused or pause) and not mine then
  local value, claimant = read_claim(claim)
  if claimant and claimant ~= id then refused, pause = {'other', claim, value}, nil end
end
-- Also if another call holds the key: a call that waits for the end of a pause is not dropped because of it.
if pause then refused = {'paused', pause[1], pause[2], pause[3]} end
local left = rate_left and not refused and mine ~= 'l' and rate_left() or 0 -- last: it counts a start
if left > 0 then
  refused = {'rate', math.ceil(left / 1000)}
  -- The client was woken for the key, and does not take it: it must not stay reserved for it.
  if string.sub(redis.call('GET', chosen) or '', 1, 9) == 'r %waiter' then redis.call('DEL', chosen) end
  -- A retry keeps its reservation until it starts, or newer calls would be before it again and again.
  if mine then
    local ttl = math.max(refused[2] + ARGV[2], redis.call('PTTL', chosen))
    redis.call('PEXPIRE', chosen, string.format('%.0f', ttl))
  end
end
local others = ''
if queue then
  local queues = wait_queues()
  -- A caller refused by a claim is not queued: claims end without running release.lua, so nothing
  -- would wake it.
  local waits = refused and refused[1] == 'other' and refused[2] ~= claim
  queues.join(queue, nonce, waits and ARGV[10] or '0', KEYS)
  if not refused and queues.has_waiters(queue) then others = ' ' end
end
if refused then
  if claim and ARGV[7] == '1' and (refused[1] == 'other' or left > 0) then change_claim(claim, id, '') end
  if not pause and left == 0 then refused[4] = redis.call('PTTL', refused[2]) end
  return refused
end
local fence = '0'
if #KEYS == 3 then -- write the counter first: an unused fence is better than a fence granted twice
  local now = redis.call('TIME')
  local next = math.max((last or 0) + 1, ARGV[5] + 1)
  fence = string.format('%.0f', math.max(now[1] * 1000000 + now[2], next))
  redis.call('HSET', KEYS[1], '|fence', fence)
end
redis.call('SET', chosen, 'l ' .. ARGV[1] .. ' ' .. fence .. ' ' .. ARGV[4] .. others, 'PX', ARGV[2])
if claim and ARGV[9] ~= '1' then change_claim(claim, id, ARGV[6], ARGV[2], ARGV[4]) end
return #KEYS == 3 and fence or {'granted', chosen}

-- Note a call as the newest of its key, unless a newer one is noted. For the newest call, delete a
-- reservation for the retry of an older one; the retry finds the newer call when it runs.
-- KEYS: the newest call, the lock, its wait queue, the list that its clients block on
-- ARGV: time of the call in seconds ('' now), its call id, ttl in ms, token of the reservation ('' none)
-- Reply: '<time> <call id>' of the newest call
local now = redis.call('TIME')
now = string.format('%d.%06d', now[1], now[2])
-- A publisher whose clock is ahead must not cancel the calls that are made after this one.
local at = ARGV[1] ~= '' and tonumber(ARGV[1]) <= tonumber(now) and ARGV[1] or now
local noted = redis.call('GET', KEYS[1]) or ''
local time, id = string.match(noted, '^(%S+) (%S+)$')
if id ~= ARGV[2] then
  -- A call in the future: the server's clock was set back. Then the order of arrival counts.
  if not time or tonumber(time) > tonumber(now) then time = -1 end
  local newer = time - at
  if newer > 0 or (newer == 0 and id > ARGV[2]) then return noted end
  noted = at .. ' ' .. ARGV[2]
  -- An older call that waits is woken to find out that it does not run. It brings a handoff token that
  -- no reservation has. This call may count as waiting too.
  local waiting = redis.pcall('ZCOUNT', KEYS[3], '-inf', '+inf')
  if type(waiting) == 'number' and waiting > 1 and type(redis.pcall('RPUSH', KEYS[4], 'newer')) == 'number' then
    redis.call('PEXPIRE', KEYS[4], 500)
  end
end
redis.call('SET', KEYS[1], noted, 'PX', ARGV[3])
local reserved = string.match(redis.call('GET', KEYS[2]) or '', '^r (%S+) ')
if reserved == ARGV[4] then redis.call('DEL', KEYS[2]) end
return noted

-- Sweep the queue of a key after a while.
-- KEYS: queue, its calls, due set, lock
-- ARGV: ms, a call id ('' all calls that may run), why: 'unpublished' its hint was not published,
--       'perhaps' the broker may have that nevertheless, 'returns' the broker delivers its message again
-- Reply: 1
local queue, calls, due, key = unpack(KEYS)
local ms, id, why = tonumber(ARGV[1]), ARGV[2], ARGV[3]
redis.call('ZREM', queue, '') -- see queue_acquire.lua
local q = call_queue(key, {key}, queue, calls, due)
local call = q.read(id)
local function look_by(call)
  if call and call.at > q.now + ms then q.look_in(call, ms) end
end
if call and call.letter ~= 'x' then
  if why ~= 'returns' and call.letter == 'h' and call.copies > 0 then
    call.copies = call.copies - 1
    if why == 'perhaps' then call.repeated = '1' end
  end
  q.look_in(call, ms)
  -- Its process may have died before it published the next call that may run at the same time.
  local behind = why == 'returns' and q.limit > 1 and q.new_behind(id)
  if behind and behind.at > q.now + 1000 then q.look_in(behind, 1000) end
elseif call then
  look_by(call) -- the sweep that stores its result is not put off
elseif id == '' then
  -- Those that could run before the limit was lowered too.
  for _, one in ipairs(redis.call('ZRANGE', queue, 0, q.used - 1)) do look_by(q.read(one)) end
end
q.plan()
return 1

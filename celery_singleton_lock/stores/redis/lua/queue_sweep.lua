-- Sweep the queue of a key whose time has come: hint the calls that may run again, or say that they are lost.
-- KEYS: queue, its calls, due set, the shard's hash, slot, slot ...
-- Replies: a list; for each call {'hinted', task, copies, begins, message}, or {'lost', task, copies, begins,
--          message}: its result is to be stored, then the call is removed;
--          {'slots', number}: so many slots are to be given
local queue, calls, due, shard, key = unpack(KEYS)
local slots = {unpack(KEYS, 5)}
local q = call_queue(key, slots, queue, calls, due)
if q.used > #slots then return {'slots', q.used} end
redis.call('ZREM', queue, '') -- see queue_acquire.lua
-- Workers sweep at the same time, and find the same keys due. One of them publishes the calls.
if not q.is_past(tonumber(redis.call('ZSCORE', due, key) or 0)) then return {} end
local found = {}
local function look_at(call)
  if q.is_running(call.id) then
    q.look_in(call, redis.call('PTTL', (q.slot_of(call.id))) + 1)
  elseif call.letter == 'b' and call.late == '0' then
    -- A client that lives, but got no reply to its acquire, may still say that no body has begun.
    call.letter = 'o'
    q.look_in(call, 5000)
  elseif call.letter == 'o' or call.letter == 'x' then
    call.letter = 'x'
    q.look_in(call, 60000) -- if this client dies meanwhile
    local reply = q.reply(call)
    found[#found + 1] = {'lost', reply[1], reply[2], reply[3], reply[4] or ''}
  elseif not q.message(call.id) then
    -- The store has no message of this call: it joined by running, and its worker died. The broker still
    -- has the message, which is acknowledged late; it joins again when it is delivered.
    q.take_out(call.id)
  else
    local pauses = shard_pauses(shard)
    local pause = pauses.of(key)
    if pause then q.look_in(call, pauses.look_after(pause[3]))
    -- A retry whose key was paused does not come by itself: its reservation keeps no sweep from it.
    elseif q.hint(call) then found[#found + 1] = {'hinted', unpack(q.reply(call))} end
  end
end
local function sweep()
  local is_blocked = false -- by a call that has not begun
  for _, id in ipairs(q.front()) do
    local call = q.read(id)
    local is_new = call and q.is_new(call)
    if not call then q.take_out(id)
    elseif not (is_new and is_blocked) and q.is_past(call.at) then look_at(call) end
    is_blocked = is_blocked or is_new
  end
end
local before = redis.call('ZCARD', queue)
sweep()
if redis.call('ZCARD', queue) < before then sweep() end -- those that may run in the place of one that is gone
q.plan()
return found

-- Sweep the queue of a key whose time has come: hint its head again, or say that it is lost.
-- KEYS: lock, queue, its calls, due set, the shard's hash
-- Replies: {}; {'hinted', task, copies, begins, message}; {'lost', task, copies, begins, message}: its
--          result is to be stored, then the call is removed
local key, queue, calls, due, shard = unpack(KEYS)
redis.call('ZREM', queue, '') -- see queue_acquire.lua
local q = call_queue(key, queue, calls, due)
-- Workers sweep at the same time, and find the same keys due. One of them publishes the call.
if not q.is_due() then return {} end
while true do
  local id = q.head()
  if not id then
    redis.call('ZREM', due, key)
    return {}
  end
  -- A retry whose key was paused does not come by itself: its reservation keeps no sweep from it.
  local is_own = q.is_reserved_for(id)
  if not is_own and q.is_held() then return {} end
  local call = q.read(id)
  if call and call.letter == 'b' and call.late == '0' then
    -- A client that lives, but got no reply to its acquire, may still say that no body has begun.
    call.letter = 'o'
    q.write(call)
    q.look_in(5000)
    return {}
  elseif call and call.letter == 'o' then
    call.letter = 'x'
    q.write(call)
  end
  if call and call.letter == 'x' then
    q.look_in(60000) -- if this client dies meanwhile
    local reply = q.reply(call)
    return {'lost', reply[1], reply[2], reply[3], reply[4] or ''}
  end
  if call and q.message(id) then
    local pauses = shard_pauses(shard)
    local pause = pauses.of(key)
    if not pause then return {'hinted', unpack(q.reply(q.hint(is_own)))} end
    q.look_in(pauses.look_after(pause[3]))
    return {}
  end
  -- The store has no message of this call: it joined by running, and its worker died. The broker still
  -- has the message, which is acknowledged late; it joins again when it is delivered.
  q.take_out(id)
end

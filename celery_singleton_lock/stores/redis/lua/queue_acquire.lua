-- Appended to acquire.lua as a function: the acquire of a call that has a place in the queue of its key.
-- KEYS: of acquire.lua, perhaps with more slots than may be granted; queue, its calls, due set, last number, the
--       call's ended completion record
-- ARGV: of acquire.lua; '1' if the message is acknowledged late, how often a body may begin by one message, the
--       nonces with which this delivery has asked before, each with a blank before and after it, how many calls
--       may run at a time
-- Replies: of acquire.lua, and
--   {'queued' ...}: the store has the call, so this copy of its message can be dropped
--   {'unqueued' ...}: the call must join, with its message, before this copy is dropped
--   {'lost'}: the call had begun, acknowledged early or as often as it may, and its lease ended: it does not begin
--   again
--   {'rate', ms, call id, copies, begins, message}: the call is to be published, and to arrive in so many ms
--   {'granted', slot, call id, copies, begins, message, ms}: the next call is to be published, to arrive in so many ms
--   {'slots', number}: so many slots are to be given, because calls may hold them
--   The values after the word are those of a refusal: slot, value, ttl left in ms.
local ended, counter, due, calls, queue =
  table.remove(KEYS), table.remove(KEYS), table.remove(KEYS), table.remove(KEYS), table.remove(KEYS)
local limit, asked = tonumber(table.remove(ARGV)), table.remove(ARGV)
local most, late, key = tonumber(table.remove(ARGV)), table.remove(ARGV), KEYS[3]
local last = #KEYS - (ARGV[10] and 1 or 0) - (ARGV[6] and ARGV[6] ~= '-' and 1 or 0)
local slots = {unpack(KEYS, 3, last)}
local q = call_queue(key, slots, queue, calls, due)
if q.used > #slots then return {'slots', q.used} end
-- A full server refuses a script whose first write needs memory; behind a removal it lets them pass.
redis.call('ZREM', queue, '')
local id, nesting, retries, nonce = string.match(ARGV[1], '^([^|]+)|(%d+)%.(%d+)|(.*)$')
nesting, retries = tonumber(nesting), tonumber(retries)
local sequence = tonumber(ARGV[3])
if q.has_ended(ended, nesting, retries) then return {'done'} end
local call = q.read(id)
local age = call and q.age(call, nesting, retries, sequence)
if call and (age > 0 or call.letter == 'x') then return {'superseded'} end
local kept = call and age == 0 and q.message(id) and 'queued' or 'unqueued'
q.set_limit(limit)
if call and q.keep_limit() then q.plan() end
-- A slot that is not granted any more, since fewer calls may run than before.
local held = q.slot_of(id)
for i = #slots, limit + 1, -1 do table.remove(KEYS, 2 + i) end
local is_beyond = held and tonumber(string.match(held, '#(%d+)$') or 0) >= limit
local has_turn = q.has_turn(id, call and call.begun or '0') and not (is_beyond and q.is_running(id))
-- A call keeps its place only with the message of its newest attempt: that joins before its body begins.
if not has_turn or (call and age < 0) then
  if kept == 'queued' then
    q.consume(call)
    q.plan()
  end
  local reply = {kept}
  for i = 1, math.min(#slots, 8) do
    local value = redis.call('GET', slots[i])
    if value and not reply[2] then reply = {kept, slots[i], value, redis.call('PTTL', slots[i])}
    elseif value then reply[#reply + 1], reply[#reply + 2] = slots[i], value end
  end
  return reply
end
-- A delivery whose request got no reply may have been granted the lease; it knows that no body began.
local was_granted = call and call.nonce ~= '' and string.find(asked, ' ' .. call.nonce .. ' ', 1, true)
local is_begun = call and (call.letter == 'b' or call.letter == 'o')
if call and age == 0 and not was_granted and not held and q.free() > 0
  and ((is_begun and late == '0') or call.begins >= most) then
  call.letter = 'x'
  q.look_in(call, 0)
  q.plan()
  return {'lost'}
end
if is_beyond then redis.call('DEL', held) end -- reserved for this retry
if q.slot_left() then redis.call('DEL', q.slot_left()) end
local reply = acquire()
q.look_again()
if type(reply) ~= 'string' and reply[1] ~= 'granted' then
  local word = reply[1]
  if word == 'done' and call then -- a worker whose release does not know of the queue has ended it
    q.take_out(id)
  elseif word ~= 'done' and word ~= 'superseded' and word ~= 'later' then
    reply[1] = kept
    if word == 'rate' then
      local left = reply[2]
      reply[2] = nil
      if call then q.note_next(q.now + left) end
      if kept == 'queued' and left <= 60000 then -- the copy that is published takes the place of this one
        call.copies = math.max(call.copies, 1)
        q.published(call, left)
        reply = {'rate', left, unpack(q.reply(call))}
      elseif kept == 'queued' then
        q.consume(call, math.min(left, 300000))
      end
    elseif call then
      local _, soonest = q.free()
      if word == 'paused' then soonest = shard_pauses(KEYS[1]).look_after(reply[4]) end
      if age == 0 then q.consume(call, soonest) end
    end
  end
  q.plan()
  return reply
end
if not call then
  call = {id = id, copies = 1, begins = 0, repeated = '0', nonce = ''}
  q.add(call, counter)
end
local is_repeated = call.nonce == nonce
if not is_repeated and not was_granted then call.begins = call.begins + 1 end
call.letter, call.begun, call.late, call.nonce = 'b', '1', late, nonce
call.nesting, call.retries, call.sequence = nesting, retries, sequence
q.look_in(call, ARGV[2])
q.keep_limit()
if rate_next then q.note_next(rate_next) end
local next, delay = limit > 1 and q.next(), q.rate_left()
if next and next.letter == 'w' then
  next = q.hint(next, false, delay)
elseif next and (is_repeated or was_granted) and next.letter == 'h' and q.message(next.id) then
  -- The reply was lost, perhaps with this call.
  next.repeated = '1'
  q.write(next)
else next = nil end
q.plan()
if not next then return reply end
return {'granted', reply[2], next.id, next.copies, next.begins, q.message(next.id), delay}

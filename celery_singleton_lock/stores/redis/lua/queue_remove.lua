-- Take a call out of the queue of its key.
-- KEYS: queue, its calls, due set, the call's ended completion record, slot, slot ...
-- ARGV: call id, step, nesting, retries, sequence ('' any), nonce, ttl in ms of the ended completion record,
--       the first attempt that may still come ('-' none). Steps: 'leave' marks a call that is not running, so
--       that it never begins; 'end' takes out a call that leaves, or that has ended with its attempt;
--       'withdraw' takes out one that has not begun
-- Replies: {'absent'}; {'running'} (it runs, has begun, or has a newer attempt); {'leaves', call id, copies, begins, message};
--          {'removed'} or {'removed', call id, copies, begins, message} of the call to publish next;
--          {'slots', number}: so many slots are to be given
local queue, calls, due, ended, key = unpack(KEYS)
local id, step, slots = ARGV[1], ARGV[2], {unpack(KEYS, 5)}
local q = call_queue(key, slots, queue, calls, due)
if q.used > #slots then return {'slots', q.used} end
redis.call('ZREM', queue, '') -- see queue_acquire.lua
local call = q.read(id)
if not call then return {'absent'} end
local slot, kind = q.slot_of(id)
if step == 'leave' then
  if kind == 'l' or kind == 'd' or (call.letter == 'b' and kind) then return {'running'} end
  call.letter = 'x'
  q.look_in(call, 60000) -- if this client dies meanwhile
  q.plan()
  local reply = q.reply(call)
  return {'leaves', reply[1], reply[2], reply[3], reply[4] or ''}
end
if kind == 'l' or (step == 'withdraw' and call.begun == '1')
  or (call.letter ~= 'x' and q.age(call, tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]) or call.sequence) > 0) then
  return {'running'}
end
if kind == 'r' then -- reserved for its retry
  redis.call('DEL', slot)
  q.look_again()
end
local could_run = redis.call('ZRANK', queue, id) < q.limit
q.take_out(id, ended, ARGV[6], ARGV[7], ARGV[8])
local next = q.next()
next = could_run and next and next.letter == 'w' and q.hint(next)
q.plan()
if not next then return {'removed'} end
return {'removed', unpack(q.reply(next))}

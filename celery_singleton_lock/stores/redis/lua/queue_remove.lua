-- Take a call out of the queue of its key.
-- KEYS: lock, queue, its calls, due set, the call's ended completion record
-- ARGV: call id, step, nesting, retries, sequence ('' any), nonce, ttl in ms of the ended completion record,
--       the first attempt that may still come ('-' none). Steps: 'leave' marks a call that is not running, so
--       that it never begins; 'end' takes out a call that leaves, or that has ended with its attempt;
--       'withdraw' takes out one that has not begun
-- Replies: {'absent'}; {'running'} (it runs, has begun, or has a newer attempt); {'leaves', call id, copies, begins, message};
--          {'removed'} or {'removed', call id, copies, begins, message} of the call to publish next
local key, queue, calls, due, ended = unpack(KEYS)
local id, step = ARGV[1], ARGV[2]
redis.call('ZREM', queue, '') -- see queue_acquire.lua
local q = call_queue(key, queue, calls, due)
local call = q.read(id)
if not call then return {'absent'} end
local kind, holder = string.match(redis.call('GET', key) or '', '^(%a) ([^| ]+)|')
local runs = kind == 'l' and holder == id
if step == 'leave' then
  if runs or (kind and (call.letter == 'b' or (kind == 'd' and holder == id))) then return {'running'} end
  call.letter = 'x'
  q.write(call)
  if q.head() == id then q.look_in(60000) end -- if this client dies meanwhile
  local reply = q.reply(call)
  return {'leaves', reply[1], reply[2], reply[3], reply[4] or ''}
end
if runs or (step == 'withdraw' and call.begun == '1')
  or (call.letter ~= 'x' and q.age(call, tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]) or call.sequence) > 0) then
  return {'running'}
end
if kind == 'r' and holder == id then redis.call('DEL', key) end -- reserved for its retry
local was_head = q.head() == id
q.take_out(id, ended, ARGV[6], ARGV[7], ARGV[8])
local next = was_head and q.hint()
if not next then return {'removed'} end
return {'removed', unpack(q.reply(next))}

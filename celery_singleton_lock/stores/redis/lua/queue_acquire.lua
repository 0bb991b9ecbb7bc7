-- Appended to acquire.lua as a function: the acquire of a call that has a place in the queue of its key.
-- KEYS: of acquire.lua; queue, its calls, due set, last number, the call's ended completion record
-- ARGV: of acquire.lua; '1' if the message is acknowledged late, how often a body may begin by one message, the
--       nonces with which this delivery has asked before, each with a blank before and after it
-- Replies: of acquire.lua, and
--   {'queued' ...}: the store has the call, so this copy of its message can be dropped
--   {'unqueued' ...}: the call must join, with its message, before this copy is dropped
--   {'lost'}: the call had begun, acknowledged early or as often as it may, and its lease ended: it does not begin
--   again
--   {'rate', ms, call id, copies, begins, message}: the call is to be published, and to arrive in so many ms
--   The values after the word are those of a refusal: slot, value, ttl left in ms.
local ended, counter, due, calls, queue =
  table.remove(KEYS), table.remove(KEYS), table.remove(KEYS), table.remove(KEYS), table.remove(KEYS)
local asked, most, late, key = table.remove(ARGV), tonumber(table.remove(ARGV)), table.remove(ARGV), KEYS[3]
-- A full server refuses a script whose first write needs memory; behind a removal it lets them pass.
redis.call('ZREM', queue, '')
local id, nesting, retries, nonce = string.match(ARGV[1], '^([^|]+)|(%d+)%.(%d+)|(.*)$')
nesting, retries = tonumber(nesting), tonumber(retries)
local sequence = tonumber(ARGV[3])
local q = call_queue(key, queue, calls, due)
if q.has_ended(ended, nesting, retries) then return {'done'} end
local call, head = q.read(id), q.head()
local age = call and q.age(call, nesting, retries, sequence)
if call and (age > 0 or call.letter == 'x') then return {'superseded'} end
local kept = call and age == 0 and q.message(id) and 'queued' or 'unqueued'
-- A call keeps its place only with the message of its newest attempt: that joins before its body begins.
if (head and head ~= id) or (call and age < 0) then
  local value = redis.call('GET', key)
  return value and {kept, key, value, redis.call('PTTL', key)} or {kept}
end
-- A delivery whose request got no reply may have been granted the lease; it knows that no body began.
local was_granted = call and call.nonce ~= '' and string.find(asked, ' ' .. call.nonce .. ' ', 1, true)
local is_begun = call and (call.letter == 'b' or call.letter == 'o')
if call and age == 0 and not was_granted and redis.call('EXISTS', key) == 0
  and ((is_begun and late == '0') or call.begins >= most) then
  call.letter = 'x'
  q.write(call)
  q.look_in(0)
  return {'lost'}
end
-- A copy of the message of a call ends here.
local function consume(call)
  if call.letter ~= 'h' then return end
  call.copies = math.max(call.copies - 1, 0)
  if call.copies == 0 then call.letter = 'w' end
  q.write(call)
end
local reply = acquire()
if type(reply) ~= 'string' then
  local word = reply[1]
  if word == 'done' and call then -- a worker whose release does not know of the queue has ended it
    q.take_out(id)
    if q.head() then q.look_in(0) end
  elseif word ~= 'done' and word ~= 'superseded' and word ~= 'later' then
    if word == 'paused' then
      if call then
        if age == 0 then consume(call) end
        q.look_in(shard_pauses(KEYS[1]).look_after(reply[4]))
      end
    elseif word == 'rate' then
      local left = reply[2]
      reply[2] = nil
      if call then q.note_next(q.now + left) end
      if kept == 'queued' and left <= 60000 then -- the copy that is published takes the place of this one
        call.copies = math.max(call.copies, 1)
        q.published(call, left)
        return {'rate', left, unpack(q.reply(call))}
      elseif kept == 'queued' then
        consume(call)
        q.look_by_rate(left)
      end
    elseif head then q.is_held() end
    reply[1] = kept
  end
  return reply
end
if not call then
  call = {id = id, copies = 1, begins = 0, repeated = '0', nonce = ''}
  q.add(call, counter)
end
if call.nonce ~= nonce and not was_granted then call.begins = call.begins + 1 end
call.letter, call.begun, call.late, call.nonce = 'b', '1', late, nonce
call.nesting, call.retries, call.sequence = nesting, retries, sequence
q.write(call)
q.look_in(ARGV[2])
if rate_next then q.note_next(rate_next) end
return reply

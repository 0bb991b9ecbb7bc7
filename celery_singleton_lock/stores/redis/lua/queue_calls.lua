-- Calls in the queue of a key, in order.
-- KEYS: queue, its calls, due set, lock
-- ARGV: the positions of the first and of the last call, '1' if their messages are wanted
-- Reply: for each call {call id, copies, begins, message, number, letter, ms until the rate lets it begin}; the last
--        is 0 for all but the one that begins next
local queue, calls, due, key = unpack(KEYS)
local q = call_queue(key, {key}, queue, calls, due)
local next = q.next()
local found, reply = redis.call('ZRANGE', queue, ARGV[1], ARGV[2], 'WITHSCORES'), {}
for i = 1, #found, 2 do
  local call = q.read(found[i])
  if call then
    local row = {call.id, call.copies, call.begins, ''}
    if ARGV[3] == '1' then row[4] = q.message(call.id) or '' end
    row[5], row[6] = found[i + 1], call.letter
    row[7] = next and next.id == call.id and q.rate_left() or 0
    reply[#reply + 1] = row
  end
end
return reply

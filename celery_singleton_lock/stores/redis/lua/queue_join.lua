-- Join the queue of a key. A call that is there keeps its number, and gets the message if that is newer.
-- KEYS: queue, its calls, due set, last number, the call's ended completion record [, its claim], slot, slot ...
-- ARGV: how many calls may run at a time, call id, nesting, retries, sequence, '1' if acknowledged late, message,
--       the most calls that may wait, the nonces with which the deliveries of this message have asked for the
--       lease, each with a blank before and after it [, ttl of its claim in ms, if it was not there before]
-- Replies: {'ended'}; {'full', depth}; {'waiting'} or {'hinted'}: the second is to be published. For a call
--          that was not there before, the number of calls is behind the word;
--          {'slots', number}: so many slots are to be given
local claim = ARGV[10] and table.remove(KEYS, 6)
local queue, calls, due, counter, ended, key = unpack(KEYS)
local limit, id = tonumber(ARGV[1]), ARGV[2]
local nesting, retries, sequence = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local slots = {unpack(KEYS, 6)}
local q = call_queue(key, slots, queue, calls, due)
if q.used > #slots then return {'slots', q.used} end
-- A full server refuses new calls, but not the next message of one that has a place: see queue_acquire.lua.
if redis.call('HGET', calls, '=' .. id) then redis.call('ZREM', queue, '') end
if q.has_ended(ended, nesting, retries) then return {'ended'} end
local call, depth = q.read(id), nil
if call and call.letter == 'x' then return {'waiting'} end
q.set_limit(limit)
if not call then
  depth = redis.call('ZCARD', queue)
  if depth >= tonumber(ARGV[8]) then return {'full', depth} end
  call = {id = id, letter = 'w', nesting = nesting, retries = retries, sequence = sequence, copies = 0,
    begins = 0, begun = '0', repeated = '0', late = ARGV[6], nonce = '', at = 0}
  redis.call('HSET', calls, '+' .. id, ARGV[7])
  q.write(call)
  q.add(call, counter)
  if q.keep_limit() then q.plan() end -- calls before it may begin now
  if claim then
    local _, claimant, phase = read_claim(claim)
    if claimant == id and phase ~= 'running' then redis.call('PEXPIRE', claim, ARGV[10]) end
  end
  depth = depth + 1
  if depth > limit then return {'waiting', depth} end
else
  local age = q.age(call, nesting, retries, sequence)
  if age > 0 or (age == 0 and q.message(id)) then return {call.letter == 'h' and 'hinted' or 'waiting'} end
  if q.keep_limit() then q.plan() end
  redis.call('HSET', calls, '+' .. id, ARGV[7])
  if age < 0 then
    -- The body that published it ends, or its lease is lost; or none has begun. If a body has begun by another
    -- delivery, whose message was delivered twice, this is a newer copy of a message that has been used.
    local is_begun = (call.letter == 'b' or call.letter == 'o') and call.nesting == nesting and call.retries == retries
    local is_used = is_begun and not string.find(ARGV[9], ' ' .. call.nonce .. ' ', 1, true)
    call.nesting, call.retries, call.sequence = nesting, retries, sequence
    if is_used then
      q.write(call)
      return {'waiting'}
    end
    call.letter, call.copies, call.begins, call.nonce, call.at = 'w', 0, 0, '', 0
  end
  q.write(call)
  if age == 0 then return {'waiting'} end
end
local hinted
if q.is_running(id) then q.look_in(call, redis.call('PTTL', (q.slot_of(id))) + 1) -- it publishes its retry
else hinted = q.has_turn(id, call.begun) and q.hint(call) end
q.plan()
return {hinted and 'hinted' or 'waiting', depth}

-- Appended to release.lua as a function: the release of a call that has a place in the queue of its key.
-- KEYS: of release.lua; queue, its calls, due set, the call's ended completion record
-- ARGV: of release.lua; the ttl in ms of the ended completion record ('' the call goes on: it retries, or its message
--       comes back), the ms until its next message is due, '1' if a body has begun under the lease, the
--       first attempt that may still come to this key ('-' none: the call has ended)
-- Reply: {reply of release.lua}, or behind it task, copies, begins, message, and the ms for which the key still
--        cools down, or its rate lets no call begin, of the call to publish next
local ended, due, calls, queue = table.remove(KEYS), table.remove(KEYS), table.remove(KEYS), table.remove(KEYS)
local first, begun, wait, ttl = table.remove(ARGV), table.remove(ARGV), table.remove(ARGV), table.remove(ARGV)
local id, nesting, retries = string.match(ARGV[1], '^([^|]+)|(%d+)%.(%d+)')
nesting, retries = tonumber(nesting), tonumber(retries)
local nonce, key = ARGV[2], KEYS[4]
local slots = {unpack(KEYS, 4, #KEYS - (ARGV[8] and 1 or 0) - (ARGV[10] and 1 or 0))}
redis.call('ZREM', queue, '') -- see queue_acquire.lua
local by, hinted = string.match(redis.call('GET', ended) or '', '^(%S+) %S+ (%S*)$')
local q = call_queue(key, slots, queue, calls, due)
local call = q.read(id)
local reply = release()
local cools = ARGV[5] == 'c' and math.max(redis.call('PTTL', key), 0) or 0
-- Clocks differ: a message that arrives before its key is free is dropped, and its call waits for a sweep.
local delay = math.max(cools > 0 and cools + 20 or 0, q.rate_left())
local function to_publish(next, delay)
  local found = q.reply(next)
  return {reply, found[1], found[2], found[3], found[4], delay}
end
if by == nonce and ttl ~= '' then -- repeated, because the reply was lost
  local next = hinted ~= '' and q.read(hinted)
  reply = 'released'
  return next and next.letter == 'h' and to_publish(next, delay) or {reply}
end
local is_begun = call and (call.letter == 'b' or call.letter == 'o')
-- No body has begun: that counts even if the lease has ended before its client could say so.
local is_undone = is_begun and begun == '0' and call.nonce == nonce
if not call then return {reply} end
local age = q.age(call, nesting, retries, call.sequence)
-- Repeated, because the reply was lost: the next message of the call was handed over, and has not arrived.
if ttl == '' and reply ~= 'released' and call.letter == 'h' and call.nonce == '' and call.copies == 1 and age > 0 then
  call.repeated = '1' -- or a sweep has published it meanwhile
  q.write(call)
  return to_publish(call, 0) -- the next attempt has its own countdown
end
if reply ~= 'released' and not is_undone then return {reply} end
if is_undone then
  call.begins, call.nonce = call.begins - 1, ''
  -- Those behind it wait again, unless an earlier message has begun.
  if call.begins + nesting + retries + call.sequence == 0 then call.begun = '0' end
end
-- A retry with another key, whose own retry has come back and joined this queue.
if age > 0 then ttl = '' end
if ttl == '' then
  -- The broker delivers the same message again by itself, if it was not acknowledged early. Only a newer
  -- message that has joined meanwhile is published.
  local is_handed_over = call.letter == 'w'
  if is_handed_over then call.copies = call.copies + 1 end
  if is_handed_over or (is_begun and (call.late == '1' or begun == '0')) then call.letter = 'h' end
  q.look_in(call, 60000 + wait)
  -- The grant may have named the call behind it in a reply that was lost. The next grant names it again.
  local behind = is_undone and q.limit > 1 and q.new_behind(id)
  if behind and behind.letter == 'h' then
    behind.letter, behind.at, behind.copies, behind.repeated = 'w', 0, math.max(behind.copies - 1, 0), '1'
    q.write(behind)
  end
  q.plan()
  return is_handed_over and to_publish(call, 0) or {reply}
end
q.take_out(id, ended, nonce, ttl, first)
-- Its slot is free, unless a client that waits outside of the queue has got it.
local next = q.next()
next = next and next.letter == 'w' and q.hint(next, cools > 0 and cools <= 60000, delay)
q.plan()
if not next then return {reply} end
redis.call('SET', ended, nonce .. ' ' .. first .. ' ' .. next.id, 'KEEPTTL')
return to_publish(next, delay)

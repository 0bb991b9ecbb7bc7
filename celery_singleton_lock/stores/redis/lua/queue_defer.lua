-- Sweep the queue of a key after a while, if calls are in it; earlier if its first call leaves and is due.
-- KEYS: lock, queue, its calls, due set
-- ARGV: ms, the call id whose hint was not published ('' none), '1' if the broker may have it nevertheless
-- Reply: 1
local key, queue, calls, due = unpack(KEYS)
redis.call('ZREM', queue, '') -- see queue_acquire.lua
local q = call_queue(key, queue, calls, due)
local call = q.read(ARGV[2])
if call and call.letter == 'h' and call.copies > 0 then
  call.copies = call.copies - 1
  if ARGV[3] == '1' then call.repeated = '1' end
  q.write(call)
end
local head = q.head()
local first = head and q.read(head)
-- A call that leaves waits for its result alone. Its sweep is not put off by the parent of a process that
-- died with it, which defers the sweep until the broker has delivered the message once more.
if first and first.letter == 'x' then q.look_by(ARGV[1]) elseif head then q.look_in(ARGV[1]) end
return 1

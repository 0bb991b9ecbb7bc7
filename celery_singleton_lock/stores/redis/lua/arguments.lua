-- Appended to acquire.lua as a function: the acquire of a message whose arguments later calls replace.
-- KEYS, ARGV: as of acquire.lua; the key after the claim holds the message's newest arguments
-- Reply: the reply of acquire.lua; if it is a grant, the newest arguments ('' or false: none).
--        The message is not due yet: {'not_due'}, and the ms until then
local key = table.remove(KEYS, ARGV[10] and #KEYS - 1 or #KEYS)
local first, due, newest = string.match(redis.call('GET', key) or '', '^(%d+) (%d+) (.*)$')
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local left = (due or 0) - now
-- A message that has arrived was published: as long as it may come back, its arguments outlive its claim.
local function keep()
  local ttl = 604800000 + math.max(left, 0) -- a week
  if first then redis.call('PEXPIRE', key, string.format('%.0f', math.max(ttl, redis.call('PTTL', key))))
  else redis.call('SET', key, string.format('%.0f %.0f ', now, now), 'PX', string.format('%.0f', ttl)) end
end
-- A claim in the future: the server's clock was set back. Then the message does not wait for it.
if left > 0 and now >= tonumber(first) then
  -- An old copy of a message is dropped also before the message is due, or both would be requeued.
  local state, sequence = string.match(redis.call('GET', KEYS[2]) or '- 0 ', '^(%S) (%d+) ')
  if state == '-' and tonumber(sequence) <= tonumber(ARGV[3]) then
    keep()
    return {{'not_due'}, left}
  end
end
local reply = acquire()
local is_granted = type(reply) == 'string' or reply[1] == 'granted'
local waits = reply[1] == 'other' or reply[1] == 'rate'
if not is_granted and waits and ARGV[7] == '1' then redis.call('DEL', key)
elseif is_granted or waits or reply[1] == 'paused' then keep() end
return {reply, is_granted and newest or false}

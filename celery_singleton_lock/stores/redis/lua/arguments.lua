-- Appended to acquire.lua as a function: the acquire of a message whose arguments later calls replace.
-- KEYS, ARGV: as of acquire.lua; the key after the claim holds the message's newest arguments
-- Reply: the reply of acquire.lua; if it is a grant, the newest arguments ('' or false: none)
local newest = table.remove(KEYS, ARGV[10] and #KEYS - 1 or #KEYS)
local reply = acquire()
local is_granted = type(reply) == 'string' or reply[1] == 'granted'
return {reply, is_granted and redis.call('GET', newest)}

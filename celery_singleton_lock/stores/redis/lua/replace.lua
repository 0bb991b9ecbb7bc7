-- Replace the arguments of the queued message that has a claim, and the time at which it is due.
-- KEYS: claim, arguments of the message; absent if they can't be replaced
-- ARGV: task that must have the claim, new arguments, their ttl in ms, ms from now until the message is
--       due, ms from its claim until it is due in any case ('' no bound)
-- Replies: 1 replaced, 0 the message is no longer queued, -1 its arguments can't be replaced
-- The value: time of the claim, time at which the message is due (both in ms), newest arguments
local _, claimant, phase = read_claim(KEYS[1])
if claimant ~= ARGV[1] or phase == 'running' then return 0 end
local first = string.match(redis.call('GET', KEYS[2]) or '', '^(%d+) ')
if not first then return -1 end
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
first = math.min(first, now) -- the server's clock may have been set back
local due = now + ARGV[4]
if ARGV[5] ~= '' then due = math.min(due, first + ARGV[5]) end
redis.call('SET', KEYS[2], string.format('%.0f %.0f ', first, due) .. ARGV[2], 'PX', ARGV[3])
return 1

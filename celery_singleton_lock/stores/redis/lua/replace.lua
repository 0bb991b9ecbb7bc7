-- Replace the arguments of the queued message that has a claim.
-- KEYS: claim, arguments of the message: '' until they are replaced; absent if they can't be replaced
-- ARGV: task that must have the claim, new arguments, their ttl in ms
-- Replies: 1 replaced, 0 the message is no longer queued, -1 its arguments can't be replaced
local _, claimant, phase = read_claim(KEYS[1])
if claimant ~= ARGV[1] or phase == 'running' then return 0 end
if not redis.call('GET', KEYS[2]) then return -1 end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return 1

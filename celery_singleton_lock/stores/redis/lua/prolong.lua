-- Prolong the claim of a running task whose lease is in another shard and was prolonged there.
-- KEYS: claim
-- ARGV: call id, ttl in ms
-- Replies: 1 the claim is the task's, 0 it is not
local _, claimant, phase = read_claim(KEYS[1])
if claimant ~= ARGV[1] or phase ~= 'running' then return 0 end
if redis.call('PTTL', KEYS[1]) < tonumber(ARGV[2]) then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1

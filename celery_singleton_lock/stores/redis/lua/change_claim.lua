-- Change a claim without a lease in the same script.
-- KEYS: claim [, the message's arguments: always deleted]
-- ARGV: call id, phase ('' frees the claim), ttl in ms [, 'y': the caller holds the lease of the claim]
-- Replies: 1 changed, 0 the claim is another task's, is gone, or its task is running
local _, claimant, phase = read_claim(KEYS[1])
local is_own = claimant == ARGV[1]
if is_own and phase == 'running' and ARGV[2] ~= 'running' and ARGV[4] ~= 'y' then return 0 end
if KEYS[2] then redis.call('DEL', KEYS[2]) end
if not is_own then return 0 end
change_claim(KEYS[1], ARGV[1], ARGV[2], ARGV[3], '')
return 1

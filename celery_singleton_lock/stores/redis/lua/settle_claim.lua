-- Change a claim where no lease is at hand.
-- KEYS: claim
-- ARGV: task, phase ('' frees it), ttl in ms [, 'y': its lease is the caller's]
-- Reply: 1 changed, 0 it is another's, gone, or its task is running
local _, claimant, phase = read_claim(KEYS[1])
if claimant ~= ARGV[1] then return 0 end
if phase == 'running' and ARGV[2] ~= 'running' and ARGV[4] ~= 'y' then return 0 end
change_claim(KEYS[1], ARGV[1], ARGV[2], ARGV[3], '')
return 1

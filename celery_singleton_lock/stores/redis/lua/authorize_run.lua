-- Authorize the leader to send one entry: if its token still holds the lease, replace the last run.
-- KEYS: the leader's lease, the entry's last run
-- ARGV: token, last run that must be stored ('' none), new last run, its ttl in ms
-- Replies: 'permitted', 'deposed' (the token is not the leader's) or 'changed' (another last run is stored)
local kind, token = string.match(redis.call('GET', KEYS[1]) or '', '^(%a) (%S+) ')
if kind ~= 'l' or token ~= ARGV[1] then return 'deposed' end
local last = redis.call('GET', KEYS[2]) or ''
if last == ARGV[3] then return 'permitted' end -- a repeated request: its first reply was lost
if last ~= ARGV[2] then return 'changed' end
redis.call('SET', KEYS[2], ARGV[3], 'PX', ARGV[4])
return 'permitted'

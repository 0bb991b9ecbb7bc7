-- End the pause of a key or a scope.
-- KEYS: the shard's hash
-- ARGV: name
-- Reply: text and ms left of the pause; {}: there was none
local pauses = shard_pauses(KEYS[1])
local stands = pauses.read(ARGV[1])
if not stands then return {} end
pauses.remove(ARGV[1])
return {stands[2], stands[3]}

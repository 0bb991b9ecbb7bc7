-- The pauses of a shard.
-- KEYS: the shard's hash
-- Reply: name, text and ms left of each
local pauses, found = shard_pauses(KEYS[1]), {}
if not redis.call('HGET', KEYS[1], '|pauses') then return found end
for _, name in ipairs(redis.call('HKEYS', KEYS[1])) do
  local pause = string.byte(name) ~= 124 and pauses.read(name) -- '|'
  if pause then found[#found + 1] = pause end
end
return found

-- Pause a key or a scope. A pause that ends later stays.
-- KEYS: the shard's hash
-- ARGV: name, ms ('' it does not end), JSON
-- Reply: text and ms left of the pause that is in force
local pauses = shard_pauses(KEYS[1])
local stands = pauses.read(ARGV[1])
if stands and (stands[3] == -1 or (ARGV[2] ~= '' and stands[3] >= tonumber(ARGV[2]))) then
  return {stands[2], stands[3]}
end
local ends = ARGV[2] == '' and '0' or string.format('%.0f', pauses.now + ARGV[2])
local text = ends .. ' ' .. ARGV[3]
if redis.call('HSET', KEYS[1], ARGV[1], text) == 1 then redis.call('HINCRBY', KEYS[1], '|pauses', 1) end
return {text, ARGV[2] == '' and -1 or tonumber(ARGV[2])}

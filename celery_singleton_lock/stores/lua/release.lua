-- Give back what the token holds, or turn it into another kind; never touch another's key.
-- KEYS: marker of the token's attempt, key, key ... and the message's claim, if it shall change
-- ARGV: attempt, nonce, new kind ('' deletes), its ttl in ms, its token,
--       new state of the marker ('' none), its ttl in ms,
--       the claim's new phase ('' freed, '-' there is none), its ttl in ms
-- Replies: 'released', 'not_ours', 'twin' (another delivery has it) or 'done' (another finished it)
local attempt, token = ARGV[1], ARGV[1] .. '|' .. ARGV[2]
local claim = ARGV[8] ~= '-' and table.remove(KEYS)
local reply, holder = 'not_ours', '{}'
for i = 2, #KEYS do
  local value = redis.call('GET', KEYS[i])
  local kind, held, rest = string.match(value or '', '^(%a) (%S+) (.*)$')
  if held == token then
    reply, holder = 'released', string.match(rest, '^%S+ (.*)$')
    if kind == 'l' or kind == 'd' then
      if ARGV[3] == '' then redis.call('DEL', KEYS[i])
      else redis.call('SET', KEYS[i], ARGV[3] .. ' ' .. ARGV[5] .. ' ' .. rest, 'PX', ARGV[4]) end
    end
  elseif held and string.sub(held, 1, #attempt + 1) == attempt .. '|' then
    reply = 'twin'
  end
end
if claim and (reply == 'released' or (reply == 'not_ours' and ARGV[8] == '')) then
  change_claim(claim, string.match(attempt, '^[^|]+'), ARGV[8], ARGV[9], holder)
end
if reply == 'released' and ARGV[6] == '' then return reply end -- whatever the marker says
local marker = redis.call('GET', KEYS[1])
local state, sequence, nonce = string.match(marker or '', '^(%S) (%d+) (%S*)$')
if state == 'd' and nonce ~= ARGV[2] and reply ~= 'released' then reply = 'done' end
if ARGV[6] ~= '' and state ~= 'd' and reply ~= 'twin' then
  redis.call('SET', KEYS[1], ARGV[6] .. ' ' .. (sequence or '0') .. ' ' .. ARGV[2], 'PX', ARGV[7])
end
return reply

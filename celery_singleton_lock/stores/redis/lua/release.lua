-- Release the keys that the token holds, or change their kind; never change the key of another token.
-- KEYS: completion record of the token's attempt, the key's wait queue, the list that its clients block on,
--       key, key ... and the message's claim, if it changes, and its arguments if ARGV[10] is given
-- ARGV: attempt, nonce; optionally: new state of the completion record ('' none), its ttl in ms,
--       new kind ('' deletes), its ttl in ms, its token, the claim's new phase ('' freed), its ttl in ms,
--       '1' deletes the arguments
-- Replies: 'released', 'not_ours', 'duplicate' (another delivery holds a key) or 'done' (another has finished)
local attempt, token = ARGV[1], ARGV[1] .. '|' .. ARGV[2]
local mark, become = ARGV[3] or '', ARGV[5] or ''
local arguments = ARGV[10] and table.remove(KEYS)
local claim = ARGV[8] and table.remove(KEYS)
local reply, holder, dying = 'not_ours', '{}', false
for i = 4, #KEYS do
  local value = redis.call('GET', KEYS[i]) or ''
  if string.sub(value, 2, #token + 3) == ' ' .. token .. ' ' then
    reply = 'released'
    local kind, rest = string.sub(value, 1, 1), string.sub(value, #token + 4)
    if claim then holder = string.match(rest, '^%S+ (.*)$') end
    dying = kind == 'd'
    if kind == 'l' or dying then
      if become == '' then -- a value that ends with a blank: a client waits
        if string.byte(value, -1) ~= 32 or not wait_queues().wake_next(KEYS[i], ARGV[2], KEYS[2], KEYS[3]) then
          redis.call('DEL', KEYS[i])
        end
      else redis.call('SET', KEYS[i], become .. ' ' .. ARGV[7] .. ' ' .. rest, 'PX', ARGV[6]) end
    end
  elseif string.sub(value, 3, #attempt + 3) == attempt .. '|' then
    reply = 'duplicate'
  end
end
-- The worker parent has reported the end of a dying holder, and knows whether its message comes back.
if claim and ((reply == 'released' and not dying) or (reply ~= 'duplicate' and ARGV[8] == '')) then
  change_claim(claim, string.match(attempt, '^[^|]+'), ARGV[8], ARGV[9], holder)
  if arguments then redis.call('DEL', arguments) end
end
if reply == 'released' and mark == '' then return reply end -- the completion record does not matter
local completion = redis.call('GET', KEYS[1])
local state, sequence, nonce = string.match(completion or '', '^(%S) (%d+) (%S*)$')
if state == 'd' and nonce ~= ARGV[2] and reply ~= 'released' then reply = 'done' end
-- "done" is sent when Celery has stored the outcome, so it holds for duplicates too: the request may have got
-- no reply before the lease ended, and a duplicate that has the key now may never begin.
if mark ~= '' and state ~= 'd' and (reply ~= 'duplicate' or mark == 'd') then
  redis.call('SET', KEYS[1], mark .. ' ' .. (sequence or '0') .. ' ' .. ARGV[2], 'PX', ARGV[4])
end
return reply

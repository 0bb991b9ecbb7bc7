-- Claim a key for a message that is about to be published, or return the claim that prevents it.
-- KEYS: claim [, arguments of the message, if later calls may replace them]
-- ARGV: call id, ttl in ms, holder as JSON, task whose stale claim is taken over ('' none) [, '1': the
--       message's own claim keeps its ttl, ms until the message is due]
-- Replies: {} claimed; {value, ttl left in ms} of the other message's claim
local value = redis.call('GET', KEYS[1])
local claimant = string.match(value or '', '^q (%S+) %S+ ')
if value and claimant ~= ARGV[1] and claimant ~= ARGV[4] then
  return {value, redis.call('PTTL', KEYS[1])}
end
if claimant == ARGV[1] then -- the same message, published again after a lost reply or a crash
  for i = 1, ARGV[5] == '1' and 0 or #KEYS do
    redis.call('PEXPIRE', KEYS[i], math.max(ARGV[2], redis.call('PTTL', KEYS[i])))
  end
else
  if KEYS[2] then -- see replace.lua; they expire with the claim, in case its message is never published
    local time = redis.call('TIME')
    local now = time[1] * 1000 + math.floor(time[2] / 1000)
    redis.call('SET', KEYS[2], string.format('%.0f %.0f ', now, now + ARGV[6]), 'PX', ARGV[2], 'NX')
  end
  redis.call('SET', KEYS[1], 'q ' .. ARGV[1] .. ' queued ' .. ARGV[3], 'PX', ARGV[2])
end
return {}

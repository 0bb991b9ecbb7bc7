-- Raise the completion record of one attempt; neither its state nor its sequence ever goes back.
-- KEYS: completion record [, claim of the message [, its arguments: deleted]]
-- ARGV: state ('-' waiting, 'f' finishing, 'd' done), sequence, nonce, ttl in ms;
--       with a claim: call id, the claim's new phase ('' freed), the claim's ttl in ms
-- Reply: 1
local state, sequence, nonce = string.match(redis.call('GET', KEYS[1]) or '', '^(%S) (%d+) (%S*)$')
local rank = {['-'] = 1, f = 2, d = 3}
if not state or rank[ARGV[1]] >= rank[state] then state, nonce = ARGV[1], ARGV[3] end
sequence = math.max(tonumber(sequence or 0), tonumber(ARGV[2]))
local left = redis.call('PTTL', KEYS[1])
local ttl = math.max(left, tonumber(ARGV[4]))
if state == 'f' then ttl = ARGV[1] == 'f' and ARGV[4] or math.max(left, 1) end
redis.call('SET', KEYS[1], string.format('%s %d %s', state, sequence, nonce), 'PX', ttl)
-- A missing claim is not created: the copy that replaced this message may have run and freed it.
if KEYS[2] and state ~= 'd' and read_claim(KEYS[2]) then
  change_claim(KEYS[2], ARGV[5], ARGV[6], ARGV[7])
end
if KEYS[3] then redis.call('DEL', KEYS[3]) end
return 1

-- Prepended to the scripts that change claims; returns nothing by itself.
-- Return the value of a claim's key, and its call id, phase and publisher as JSON; these are nil if the
-- value is not a claim. If the key is a list, pcall returns an error table; a lease must not fail then.
local function read_claim(key)
  local value = redis.pcall('GET', key)
  return value, string.match(type(value) == 'string' and value or '', '^q (%S+) (%S+) (.*)$')
end
-- Change the claim of a task, or create it; the claim of another task is never changed.
-- phase: 'queued', 'running' or 'retrying'; '' frees the claim. ttl: in ms. holder: of a created claim.
local function change_claim(key, id, phase, ttl, holder)
  local value, claimant, _, publisher = read_claim(key)
  if phase == '' then
    if claimant == id then redis.call('DEL', key) end
  elseif not value or claimant == id then
    local text = 'q ' .. id .. ' ' .. phase .. ' ' .. (publisher or holder)
    redis.call('SET', key, text, 'PX', ttl)
  end
end

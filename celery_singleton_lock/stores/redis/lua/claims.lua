-- Prepended to the scripts that change claims; returns nothing by itself.
-- What stands in a claim's key: its value, task, phase and publisher as JSON; no task if that isn't a
-- claim. A list answers with an error, as a table: no claim either, and no reason to fail a lease.
local function read_claim(key)
  local value = redis.pcall('GET', key)
  return value, string.match(type(value) == 'string' and value or '', '^q (%S+) (%S+) (.*)$')
end
-- Change the claim of a task, or create it; the claim of another task is never touched.
-- phase: 'queued', 'running' or 'retrying'; '' frees it. ttl in ms. holder: for a claim that is created
local function change_claim(key, task, phase, ttl, holder)
  local value, claimant, _, publisher = read_claim(key)
  if phase == '' then
    if claimant == task then redis.call('DEL', key) end
  elseif not value or claimant == task then
    local text = 'q ' .. task .. ' ' .. phase .. ' ' .. (publisher or holder)
    redis.call('SET', key, text, 'PX', ttl)
  end
end

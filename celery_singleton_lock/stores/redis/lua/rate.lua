-- Prepended to acquire.lua for a task with a rate, which adds arguments at the ends; returns nothing by itself.
-- The same formula is in stores/memory_rates.py.
-- KEYS: the time of the key: in us, when its next call would start if all starts were evenly spaced
-- ARGV: the us between two starts, and how many calls may start at once
local burst, interval = tonumber(table.remove(ARGV)), tonumber(table.remove(ARGV))
local rate_key, rate_next = table.remove(KEYS), nil
-- The us until a call may start. 0: it starts now, and is counted; rate_next is when the next one may, in ms.
local function rate_left()
  local time = redis.call('TIME')
  local now = time[1] * 1000000 + time[2]
  local at, latest = math.max(tonumber(redis.call('GET', rate_key)) or 0, now), now + burst * interval
  local function put(new)
    at = new
    redis.call('SET', rate_key, string.format('%.0f', at), 'PX', string.format('%.0f', math.ceil((at - now) / 1000)))
  end
  -- Further ahead than this rate ever is: the server's clock was set back, or the rate was a lower one.
  if at > latest then put(latest) end
  local left = at - (burst - 1) * interval - now
  if left > 0 then return left end
  put(at + interval)
  rate_next = math.ceil((at - (burst - 1) * interval) / 1000)
  return 0
end

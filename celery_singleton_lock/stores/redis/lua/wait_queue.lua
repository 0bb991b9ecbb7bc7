-- Goes before the scripts that know of the line for a key; returns nothing by itself.
-- A line is a sorted set: who waits, and until when (server time in ms) they count as alive without
-- having looked again. It is gone as soon as nobody waits. While somebody does, the lease's value ends
-- with a blank: a release that sees none asks no further. Rights may be missing: nobody is called then.
-- Its functions are made only where they are needed: a run of a script makes them anew.
local function of_lines()
  local function in_ms()
    local now = redis.call('TIME')
    return now[1] * 1000 + math.floor(now[2] / 1000)
  end
  local function somebody_waits(line)
    local alive = redis.pcall('ZCOUNT', line, in_ms(), '+inf')
    return type(alive) == 'number' and alive > 0
  end
  -- Stand in the line for ms more, and have those who hold a slot know; '0': leave it.
  local function stand(line, who, ms, slots)
    if ms == '0' then redis.pcall('ZREM', line, who) return end
    if type(redis.pcall('ZADD', line, in_ms() + ms, who)) ~= 'number' then return end
    redis.call('PEXPIRE', line, ms)
    for i = 3, #slots do
      local value = redis.call('GET', slots[i]) or ''
      if string.find(value, '^[ld] [^| ]+|%d+%.%d+|%S* %d+ {.*}$') then -- not what isn't ours
        redis.call('SET', slots[i], value .. ' ', 'KEEPTTL')
      end
    end
  end
  -- Call whoever has waited longest, if anybody waits (the server knows who of them is connected), and
  -- keep the key for that one, or who comes in between would have it.
  -- turn: token handed to the waiting client, which acquires with it. calls: the list that passes it.
  -- Reply: whether a client waits
  local function call_next(key, turn, line, calls)
    if not somebody_waits(line) then return false end
    if type(redis.pcall('RPUSH', calls, turn)) ~= 'number' then return false end
    redis.call('PEXPIRE', calls, 500)
    local kept = 'r %waiter|0.0|' .. turn .. ' 0 {"task_id":"whoever has waited longest (kept for 0.5 s)"}'
    redis.call('SET', key, kept, 'PX', 500)
    return true
  end
  return {somebody_waits = somebody_waits, stand = stand, call_next = call_next}
end

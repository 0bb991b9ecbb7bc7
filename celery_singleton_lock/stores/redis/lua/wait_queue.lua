-- Prepended to the scripts that use the wait queue of a key; returns nothing by itself.
-- A wait queue is a sorted set. Member: the nonce of a waiting client. Score: the server time in ms
-- until which the client counts as waiting without another acquire. While a client waits, the value of
-- the lease ends with a blank; a release that finds no blank does not read the queue. If the login
-- lacks a right, no client is woken. The functions are created on demand, because each run of a script
-- would create them.
local function wait_queues()
  local function in_ms()
    local now = redis.call('TIME')
    return now[1] * 1000 + math.floor(now[2] / 1000)
  end
  local function has_waiters(queue)
    local alive = redis.pcall('ZCOUNT', queue, in_ms(), '+inf')
    return type(alive) == 'number' and alive > 0
  end
  -- Join the queue for ms, and mark the leases on all slots; '0': leave the queue.
  local function join(queue, nonce, ms, slots)
    if ms == '0' then redis.pcall('ZREM', queue, nonce) return end
    if type(redis.pcall('ZADD', queue, in_ms() + ms, nonce)) ~= 'number' then return end
    redis.call('PEXPIRE', queue, ms)
    for i = 3, #slots do
      local value = redis.call('GET', slots[i]) or ''
      if string.find(value, '^[ld] [^| ]+|%d+%.%d+|%S* %d+ {.*}$') then -- only a lease's value
        redis.call('SET', slots[i], value .. ' ', 'KEEPTTL')
      end
    end
  end
  -- Wake the client that has waited longest (BLPOP serves connected clients in FIFO order), and reserve
  -- the key for it, so that no other client acquires it first.
  -- handoff: the token that the woken client acquires with. list: the list that the client blocks on.
  -- Returns whether a client was woken.
  local function wake_next(key, handoff, queue, list)
    if not has_waiters(queue) then return false end
    if type(redis.pcall('RPUSH', list, handoff)) ~= 'number' then return false end
    redis.call('PEXPIRE', list, 500)
    redis.call('SET', key, 'r %waiter|0.0|' .. handoff .. ' 0 {}', 'PX', 500)
    return true
  end
  return {has_waiters = has_waiters, join = join, wake_next = wake_next}
end

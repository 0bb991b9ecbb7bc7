-- Prepended to the scripts that use the queue of the calls of a key; returns nothing by itself.
-- key: the lock.
-- slots: the lock itself, and its other slots.
-- queue: a sorted set. Member: the call id; score: the number of the call.
-- calls: a hash with two fields for each call: '=<call id>' is its state, '+<call id>' its message.
-- due: each key of the shard whose queue is not empty, by the server time in ms of its next sweep.
-- calls may have two more fields:
--   '|next'   of a key with a rate: '<now> <next>', the server times in ms at which it was written, and at which
--             the next call may begin
--   '|limit'  if several calls may run at a time, or could: '<limit> <slots>', how many may, and the number of
--             slots that their leases may be in
-- A state is '<letter> <nesting>.<retries>.<sequence> <copies> <begins> <begun><repeated><late> <nonce> <at>'.
--   letter                      w waits; h hinted, its message is in the broker; b begun; o overdue: begun,
--                               acknowledged early, and its lease has ended; x leaves, it never begins again
--   nesting, retries, sequence  of the stored message
--   copies, begins              how often that message was published, and a run has begun by it
--   begun, repeated             1 if a run has begun by any message of the call, if any was published twice
--   late, nonce                 1 if acknowledged late; the nonce of the last begin of that attempt
--   at                          the server time in ms at which a sweep checks it; 0, or absent: it waits for its turn
-- ended, the completion record of a call: '<nonce> <first> <hinted>'.
--   nonce   of the delivery that ended the call
--   first   the first attempt that is still accepted, or '-'
--   hinted  the call id that was hinted at that end
local function call_queue(key, slots, queue, calls, due)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local text = redis.call('HGET', calls, '|limit')
  local limit, used = string.match(text or '1 1', '^(%d+) (%d+)$')
  local self = {now = now, limit = tonumber(limit), used = tonumber(used)}
  function self.read(id)
    local letter, nesting, retries, sequence, copies, begins, begun, repeated, late, nonce, at = string.match(
      redis.call('HGET', calls, '=' .. id) or '', '^(%a) (%d+)%.(%d+)%.(%d+) (%d+) (%d+) ([01])([01])([01]) (%S*) ?(%d*)$')
    if not letter then return nil end
    return {id = id, letter = letter, nesting = tonumber(nesting), retries = tonumber(retries),
      sequence = tonumber(sequence), copies = tonumber(copies), begins = tonumber(begins), begun = begun, repeated = repeated, late = late,
      nonce = nonce, at = tonumber(at) or 0}
  end
  function self.write(call)
    local state = string.format('%s %d.%d.%d %d %d %s%s%s %s %.0f', call.letter, call.nesting, call.retries,
      call.sequence, call.copies, call.begins, call.begun, call.repeated, call.late, call.nonce, call.at)
    redis.call('HSET', calls, '=' .. call.id, state)
  end
  -- A worker or publisher says how many calls may run at a time. The last one is right: a deploy changes it.
  function self.set_limit(most) self.limit, self.used = most, math.max(most, self.used) end
  -- Returns whether it has changed.
  function self.keep_limit()
    local new = string.format('%d %d', self.limit, self.used)
    if new == (text or '1 1') then return false end
    redis.call('HSET', calls, '|limit', new)
    return true
  end
  -- Above 0 if the stored message is newer than the given one, below 0 if it is older.
  function self.age(call, nesting, retries, sequence)
    if call.nesting ~= nesting then return call.nesting - nesting end
    if call.retries ~= retries then return call.retries - retries end
    return call.sequence - sequence
  end
  -- Whether an attempt has ended here.
  function self.has_ended(ended, nesting, retries)
    local value = redis.call('GET', ended)
    if not value then return false end
    local first_nesting, first_retries = string.match(value, '^%S+ (%d+)%.(%d+) ')
    if not first_nesting then return true end
    if nesting ~= tonumber(first_nesting) then return nesting < tonumber(first_nesting) end
    return retries < tonumber(first_retries)
  end
  function self.message(id) return redis.call('HGET', calls, '+' .. id) end
  -- Look at a call in ms.
  function self.look_in(call, ms)
    call.at = now + math.max(ms, 0)
    self.write(call)
  end
  -- Whether a time has come. One that no deadline or ttl reaches: the server's clock was set back.
  function self.is_past(at) return at <= now or at > now + 8 * 86400000 end
  -- The calls that may run: as many as the limit from the first one on.
  function self.front() return redis.call('ZRANGE', queue, 0, self.limit - 1) end
  -- Whether no body of a call has begun, and one may begin: those behind it wait for that.
  function self.is_new(call) return call.begun == '0' and call.letter ~= 'x' end
  -- Whether a call may begin now: it is one of those that may run, and all before it have begun.
  function self.has_turn(id, begun)
    local front = self.front()
    for _, other in ipairs(front) do
      if other == id then return true end
      local call = begun == '0' and self.read(other)
      if call and self.is_new(call) then return false end
    end
    return #front < self.limit and begun == '0'
  end
  local found
  -- What the slots hold, read once: for each call that has one its slot and the kind of that, how many of those
  -- that may be granted are free, and if none is, the ms until one may be: the end of a lease, or a second for one
  -- whose holder has no place, because its release does not know of the queue.
  local function held()
    if found then return found end
    found = {slot_of = {}, kind_of = {}, free = 0, soonest = 3600000}
    local is_first = {}
    for _, id in ipairs(self.front()) do is_first[id] = true end
    for i, slot in ipairs(slots) do
      local kind, holder = string.match(redis.call('GET', slot) or '', '^(%a) ([^| ]+)|')
      local has_place = holder and self.read(holder)
      if holder then found.slot_of[holder], found.kind_of[holder] = slot, kind end
      if i > self.limit then -- not granted any more
      -- A retry that is not one of those that may run, because the limit is lower now, leaves them its slot.
      elseif not holder and redis.call('EXISTS', slot) == 0 then found.free = found.free + 1
      elseif kind == 'r' and has_place and not is_first[holder] then
        found.free = found.free + 1
        found.left = slot
      else
        local ttl = math.max(redis.call('PTTL', slot), 0) + 1
        found.soonest = math.min(found.soonest, has_place and ttl or math.min(ttl, 1000))
      end
    end
    if found.free > 0 then found.soonest = 0 end
    return found
  end
  -- The slots have changed.
  function self.look_again() found = nil end
  -- The slot with a key of a call, and the kind of that.
  function self.slot_of(id) return held().slot_of[id], held().kind_of[id] end
  -- Whether a body of a call has a lease.
  function self.is_running(id)
    local kind = held().kind_of[id]
    return kind ~= nil and kind ~= 'r'
  end
  function self.free() return held().free, held().soonest end
  -- A slot that a retry leaves to the calls that may run.
  function self.slot_left() return held().left end
  -- The first call that may run and has to be published: it has not begun, or no slot was free when it came again.
  -- One that has not begun and is hinted already is returned too: those behind it wait for it. nil: there is none.
  function self.next()
    for _, id in ipairs(self.front()) do
      local call = self.read(id)
      if call and (self.is_new(call) or (call.letter == 'w' and not self.is_running(id))) then return call end
    end
  end
  -- The first call behind one that may run and has not begun; nil: there is none.
  function self.new_behind(id)
    local is_behind = false
    for _, other in ipairs(self.front()) do
      local call = is_behind and self.read(other)
      if call and self.is_new(call) then return call end
      is_behind = is_behind or other == id
    end
  end
  -- Note the server time in ms at which the rate of the key lets its next call begin.
  function self.note_next(at) redis.call('HSET', calls, '|next', string.format('%.0f %.0f', now, at)) end
  -- Look again when the rate lets a call begin, or in five minutes: a deploy may have brought a higher one.
  function self.look_by_rate(call, left) self.look_in(call, math.min(left, 300000)) end
  -- The ms until the rate of the key lets its next call begin.
  function self.rate_left()
    local at, next = string.match(redis.call('HGET', calls, '|next') or '', '^(%d+) (%d+)$')
    if not at or tonumber(at) > now then return 0 end -- later than now: the server's clock was set back
    return math.max(tonumber(next) - now, 0)
  end
  -- Add a call at the end. counter: the last number of the shard, which outlives the queue: a key that is
  -- empty again must not give a number twice.
  function self.add(call, counter)
    local number = math.max(time[1] * 1000000 + time[2], (redis.call('GET', counter) or 0) + 1)
    number = string.format('%.0f', number)
    redis.call('SET', counter, number)
    redis.call('ZADD', queue, number, call.id)
  end
  -- Take a call out. nonce: of its end; nil: the call has not ended. first: the first attempt that may still
  -- come, '-' if none may.
  function self.take_out(id, ended, nonce, ttl, first)
    local call = nonce and self.read(id)
    -- Several copies of the message may arrive after the end, for as long as brokers keep messages.
    if call and call.repeated == '1' then ttl = string.format('%.0f', math.max(ttl, 604800000)) end
    redis.call('ZREM', queue, id)
    redis.call('HDEL', calls, '=' .. id, '+' .. id)
    found = nil
    if nonce then redis.call('SET', ended, nonce .. ' ' .. first .. ' ', 'PX', ttl) end
  end
  -- The last step of each script that changes something: the time of the next sweep is the first at which one of
  -- the calls that may run is to be looked at. One that could begin, and waits for nothing, is looked at now.
  function self.plan()
    local soonest, is_blocked = 1e15, false
    local front = self.front()
    for _, id in ipairs(front) do
      local call = self.read(id)
      local is_new = call and self.is_new(call)
      -- One behind a call that has not begun is looked at after that.
      if not (is_new and is_blocked) then soonest = math.min(soonest, call and call.at or 0) end
      is_blocked = is_blocked or is_new
    end
    if front[1] then
      redis.call('ZADD', due, string.format('%.0f', math.max(soonest, now)), key)
    else
      redis.call('ZREM', due, key)
      redis.call('HDEL', calls, '|next', '|limit')
    end
  end
  -- Note that the message of a call is published, and is to arrive in delay ms, of which there are 60 s at most.
  -- The deadline of a hint is 60 s, and grows fourfold: a backlog of two hours makes five copies.
  function self.published(call, delay)
    call.letter = 'h'
    self.look_in(call, 60000 * 4 ^ math.min(call.copies - 1, 6) + delay)
  end
  -- A copy of the message of a call ends here. A sweep checks the call in ms; nil: it waits for its turn.
  function self.consume(call, ms)
    if call.letter == 'h' then
      call.copies = math.max(call.copies - 1, 0)
      if call.copies == 0 or ms then call.letter = 'w' end
    end
    if call.letter == 'w' then call.at = ms and now + ms or 0 end
    self.write(call)
  end
  -- Hint a call if a slot is free, reserved for it, or in cooldown. Its message is delayed by delay ms. Returns
  -- the call; nil: none is to be published.
  function self.hint(call, cools, delay)
    if not call then return nil end
    local free, soonest = self.free()
    local _, kind = self.slot_of(call.id)
    if free == 0 and kind ~= 'r' and not cools then
      -- One that has begun gets the next slot, before those behind it.
      if call.letter == 'b' then call.letter, call.copies = 'w', 0 end
      self.look_in(call, soonest)
      return nil
    end
    if not self.message(call.id) then
      self.look_in(call, 0)
      return nil
    end
    if (delay or 0) > 60000 then -- a worker keeps a delayed message in its memory: a sweep comes soon enough
      self.look_by_rate(call, delay)
      return nil
    end
    call.copies = call.copies + 1
    if call.copies > 1 then call.repeated = '1' end
    self.published(call, delay or 0)
    return call
  end
  -- The reply for a hint: call id, copies, begins, message.
  function self.reply(call)
    return {call.id, call.copies, call.begins, self.message(call.id)}
  end
  return self
end

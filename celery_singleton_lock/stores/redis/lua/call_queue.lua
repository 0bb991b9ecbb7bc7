-- Prepended to the scripts that use the queue of the calls of a key; returns nothing by itself.
-- key: the lock.
-- queue: a sorted set. Member: the call id; score: the number of the call.
-- calls: a hash with two fields for each call: '=<call id>' is its state, '+<call id>' its message.
-- due: each key of the shard whose queue is not empty, by the server time in ms of its next sweep.
-- calls has one more field if the key has a rate: '|next' is '<now> <next>', the server times in ms at which it
-- was written, and at which the next call may begin.
-- A state is '<letter> <nesting>.<retries>.<sequence> <copies> <begins> <begun><repeated><late> <nonce>'.
--   letter                      w waits; h hinted, its message is in the broker; b begun; o overdue: begun,
--                               acknowledged early, and its lease has ended; x leaves, it never begins again
--   nesting, retries, sequence  of the stored message
--   copies, begins              how often that message was published, and a run has begun by it
--   begun, repeated             1 if a run has begun by any message of the call, if any was published twice
--   late, nonce                 1 if acknowledged late; the nonce of the last begin of that attempt
-- ended, the completion record of a call: '<nonce> <first> <hinted>'.
--   nonce   of the delivery that ended the call
--   first   the first attempt that is still accepted, or '-'
--   hinted  the call id that was hinted at that end
local function call_queue(key, queue, calls, due)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local self = {now = now}
  function self.read(id)
    local letter, nesting, retries, sequence, copies, begins, begun, repeated, late, nonce = string.match(
      redis.call('HGET', calls, '=' .. id) or '', '^(%a) (%d+)%.(%d+)%.(%d+) (%d+) (%d+) ([01])([01])([01]) (%S*)$')
    if not letter then return nil end
    return {id = id, letter = letter, nesting = tonumber(nesting), retries = tonumber(retries),
      sequence = tonumber(sequence), copies = tonumber(copies), begins = tonumber(begins), begun = begun, repeated = repeated, late = late,
      nonce = nonce}
  end
  function self.write(call)
    local text = string.format('%s %d.%d.%d %d %d %s%s%s %s', call.letter, call.nesting, call.retries, call.sequence,
      call.copies, call.begins, call.begun, call.repeated, call.late, call.nonce)
    redis.call('HSET', calls, '=' .. call.id, text)
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
  function self.head() return redis.call('ZRANGE', queue, 0, 0)[1] end
  function self.message(id) return redis.call('HGET', calls, '+' .. id) end
  function self.look_in(ms) redis.call('ZADD', due, string.format('%.0f', now + ms), key) end
  -- As look_in, but a sweep that comes earlier stays.
  function self.look_by(ms) redis.call('ZADD', due, 'LT', string.format('%.0f', now + ms), key) end
  -- Whether the time of its sweep has come. One that no deadline or ttl reaches: the server's clock was set back.
  function self.is_due()
    local at = tonumber(redis.call('ZSCORE', due, key) or 0)
    return at <= now or at > now + 8 * 86400000
  end
  -- Whether the key is held. Then the next sweep is at the end of the lease, or in a second if the holder has
  -- no place: its release does not know of the queue.
  function self.is_held()
    local value = redis.call('GET', key)
    if not value then return false end
    local holder, ttl = string.match(value, '^%a ([^| ]+)|'), math.max(redis.call('PTTL', key), 0) + 1
    self.look_in(holder and self.read(holder) and ttl or math.min(ttl, 1000))
    return true
  end
  -- Whether the key is reserved for the retry of a call.
  function self.is_reserved_for(id)
    return string.sub(redis.call('GET', key) or '', 1, #id + 3) == 'r ' .. id .. '|'
  end
  -- Note the server time in ms at which the rate of the key lets its next call begin.
  function self.note_next(at) redis.call('HSET', calls, '|next', string.format('%.0f %.0f', now, at)) end
  -- Look again when the rate lets a call begin, or in five minutes: a deploy may have brought a higher one.
  function self.look_by_rate(left) self.look_in(math.min(left, 300000)) end
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
    if nonce then redis.call('SET', ended, nonce .. ' ' .. first .. ' ', 'PX', ttl) end
    if not self.head() then
      redis.call('ZREM', due, key)
      redis.call('HDEL', calls, '|next')
    end
  end
  -- Note that the message of a call is published, and is to arrive in delay ms, of which there are 60 s at most.
  -- The deadline of a hint is 60 s, and grows fourfold: a backlog of two hours makes five copies.
  function self.published(call, delay)
    call.letter = 'h'
    self.write(call)
    self.look_in(60000 * 4 ^ math.min(call.copies - 1, 6) + delay)
  end
  -- Hint the call at the head if the key is free, or is_own: it is reserved for that call, or cools down. Its
  -- message is delayed by delay ms. Returns the call; nil: none is to be published.
  function self.hint(is_own, delay)
    local id = self.head()
    if not id or (not is_own and self.is_held()) then return nil end
    local call = self.read(id)
    if not call or call.letter == 'x' or not self.message(id) then
      -- The client that has made a call leave stores its result, and then removes it.
      self.look_in(call and call.letter == 'x' and 60000 or 0)
      return nil
    end
    if (delay or 0) > 60000 then -- a worker keeps a delayed message in its memory: a sweep comes soon enough
      self.look_by_rate(delay)
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

-- Prepended to the scripts that begin, publish, pause and list calls; returns nothing by itself.
-- shard: a hash, which every acquire reads.
--   '|fence'   the last fence
--   '|pauses'  how many of the other fields there are; each is a pause
--   a scope, or a key without its shard: '<end> <JSON>', the server time in ms at which the pause ends ('0': never)
local function shard_pauses(shard)
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local self = {now = now}
  -- The field, text and ms left (-1: it does not end) of the pause of a name, if there is one.
  function self.read(name)
    local text = redis.call('HGET', shard, name)
    local ends = text and tonumber(string.match(text, '^%d+'))
    if not ends then return nil end
    if ends == 0 then return {name, text, -1} end
    if ends > now then return {name, text, ends - now} end
    self.remove(name) -- it is over
  end
  function self.remove(name)
    if redis.call('HDEL', shard, name) == 1 and redis.call('HINCRBY', shard, '|pauses', -1) <= 0 then
      redis.call('HDEL', shard, '|pauses')
    end
  end
  -- The pause of a key, or of its scope: the one that ends last.
  function self.of(key)
    local name = string.match(key, '}:(.*)$')
    local one, other = self.read(name), self.read(string.match(name, '^[^:]*'))
    if one and other then return (one[3] == -1 or (other[3] ~= -1 and one[3] > other[3])) and one or other end
    return one or other
  end
  -- The ms until a call that is paused is looked at again, unless it is resumed before.
  function self.look_after(left) return left == -1 and 3600000 or math.min(left, 3600000) end
  return self
end

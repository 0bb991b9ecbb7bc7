-- Prepended to acquire.lua for a task without a rate, in place of rate.lua; returns nothing by itself.
local rate_left, rate_next

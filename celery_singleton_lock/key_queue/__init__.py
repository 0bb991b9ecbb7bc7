"""The queue of a key (``on_conflict="queue"``): everything about it outside the stores.

========== =========================================================================
module     what it does
========== =========================================================================
join       a call takes its place when it is published
feature    the place of a call that a worker runs, and the release to the next one
hint       publishes the message of the call that is to run next
sweep      publishes again what was lost, and ends what never runs again
ends       a call that ends without a run: its child died, its message is discarded
results    the result of a call that never runs
inspection what operators see and cancel
========== =========================================================================

`core.call_queue` is the interface to the stores.
"""

/* Messages on one key: jobs with retries, their deliveries, and the outcomes of these.
 *
 * A message is acknowledged late. It is delivered again when the child or the worker that has it
 * dies, and also while they are alive (visibility timeout). As with Redis as the broker, a delivery
 * has its message's tag: acknowledging one delivery acknowledges the message for all of them.
 *
 * There is no time in this model: that a lease stands in the store as long as its holder trusts it is
 * shown by lease.pml. So a lease may expire as soon as its holder does not trust it any more, and a
 * holder may stop trusting at any time. A nonce identifies a delivery among those that are alive: in
 * this model that is the number of the child, and 0 is a delivery that has ended.
 *
 * A delivery whose body does not begin for longer than the visibility timeout (it waits in a worker's
 * prefetch, or for a broker that takes no copy) is among the behaviours only with SLOW_TO_BEGIN: then
 * its second delivery may begin and die, and the first one be skipped.
 *
 * With CANCELS the policy is on_conflict="cancel_running", and the second job is the newer call: it is
 * noted as the newest, the holder looks for it, and the first job ends REVOKED if it has not ended before.
 * The newest call waits in its child until the key is free; its timeout is not among the behaviours.
 *
 * The comment before an action names the functions that implement it, in brackets; [environment]
 * marks what happens to the protocol. FAULTS is the number of faults in a run.
 *
 * Must-fail variants, each a protection taken out: NO_NONCE, NO_MARKER, NO_ORDINAL, NO_RESERVATION,
 * ACK_FIRST, SKIP_STARTED, RELEASE_ON_ANNOUNCEMENT, DUPLICATE_TAKES_ALL, TAKES_OVER, NOTED_IF_REFUSED.
 */

#define CHILDREN 2
#ifndef FAULTS
#define FAULTS 2
#endif
#define COPIES 6 /* messages at a time; an assertion checks that they are enough */
#define JOBS 2
#define ATTEMPTS 2 /* of the first job; the second doesn't retry */

/* Where a child is. */
#define IDLE 0
#define ARRIVED 1 /* with a delivery; acquire is next */
#define BODY 2
#define STORED 3 /* the result is stored, the lease is still there */
#define CALLING 4 /* released early, to send what the message triggers */
#define RETRYING 5 /* the next attempt is published */
#define PUTTING_BACK 6
#define PUBLISHED 7 /* the copy is with the broker */
#define LEAVING 8 /* acknowledging is next */
#define DOOMED 9 /* the hard limit was announced, the body still runs */
#define DEAD 10
#define MARKING 11 /* released, the result is stored; "done" is next */
#define GRANTED 12 /* with CANCELS: noting the call is next */
#define REFUSED 13 /* the same, and another job has the key */
#define CANCELLED 14 /* before the body; REVOKED is stored */

/* A message. */
#define NONE 0
#define READY 1
#define UNACKED 2

/* The kind of the key's value. [core/lease.py Kind] */
#define FREE 0
#define LEASE 1
#define RESERVED 2
#define DYING 3

/* The marker of an attempt. [core/store_requests.py CompletionState] */
#define UNKNOWN 0
#define WAITING 1
#define FINISHING 2
#define DONE 3

/* What a delivery found in the store. [core/store_requests.py Relation] */
#define OWN 0
#define DROPPED 1 /* done, superseded, or later: its message has ended */
#define EARLIER 2
#define DUPLICATE 3
#define OTHER 4

typedef Copy {
  byte state;
  byte job;
  bit attempt;
  byte sequence;
  bit started;
};

typedef Child {
  byte at;
  byte copy; /* 1 and up; 0: none */
  bit started; /* whether work is known to have begun; the header of the next copy says so */
  bit trusts;
};

typedef Completion {
  byte state;
  byte sequence;
};

Copy copy[COPIES];
Child child[CHILDREN];

/* The store. */
byte kind;
byte key_job;
bit key_attempt;
byte key_nonce; /* the child whose delivery has it, 1 and up; 0: a delivery that has ended */
Completion marker[JOBS * ATTEMPTS];

#ifdef CANCELS
byte newest; /* the job (1 and up) that is noted as the newest call; 0: none */
#define IS_OLDER (newest > MY(job) + 1)
#endif

byte faults = FAULTS;

/* Ghosts. */
bit skips[JOBS]; /* on_conflict is "skip" (with SKIPS), else "retry" */
bit began[JOBS]; /* a body of it has begun */
bit done[JOBS]; /* it has a result */
bit over[JOBS * ATTEMPTS]; /* an attempt's outcome is final and stored, and its lease released */
byte between; /* the job (1 and up) whose key is reserved for its next attempt */

#define MY(field) copy[child[me].copy - 1].field
#define MY_ATTEMPT (MY(job) * ATTEMPTS + MY(attempt))
#define MY_MARKER marker[MY(job) * ATTEMPTS + MY(attempt)]
#define SAME_ATTEMPT (kind != FREE && key_job == MY(job) && key_attempt == MY(attempt))
#ifdef NO_NONCE
#define MINE (SAME_ATTEMPT && kind != RESERVED)
#else
#define MINE (SAME_ATTEMPT && kind != RESERVED && key_nonce == me + 1)
#endif

#define ANY(claim) (claim(0) || claim(1))
#define RUNS(i) (child[i].trusts && me != i)
#define REFERS(i) (child[i].copy == slot + 1)

/* Used within one step, and 0 between steps. */
byte met, slot, v;

inline free_key() {
  kind = FREE;
  key_job = 0;
  key_attempt = 0;
  key_nonce = 0
}

/* The store's reply to an acquire. [stores/redis/lua/acquire.lua] [stores/transitions.py _relation] [stores/transitions.py _acquire] */
inline relate() {
  if
#ifndef NO_MARKER
  :: MY_MARKER.state == DONE -> met = DROPPED
  :: MY_MARKER.state == FINISHING -> met = DUPLICATE
#endif
  :: MY_MARKER.state == WAITING && MY_MARKER.sequence > MY(sequence) -> met = DROPPED
  :: else ->
    if
    :: kind == FREE -> met = OWN
    :: kind != FREE && key_job != MY(job) -> met = OTHER
#ifdef NO_ORDINAL
    :: kind != FREE && key_job == MY(job) -> met = OWN
#else
    :: kind != FREE && key_job == MY(job) && key_attempt > MY(attempt) -> met = DROPPED
    :: kind != FREE && key_job == MY(job) && key_attempt < MY(attempt) -> met = EARLIER
    :: SAME_ATTEMPT ->
      if
      :: kind == RESERVED || (kind == LEASE && MINE) -> met = OWN
      :: else -> met = DUPLICATE
      fi
#endif
    fi
  fi
}

inline grant() {
  assert(between == 0 || between == MY(job) + 1);
  between = 0;
  kind = LEASE;
  key_job = MY(job);
  key_attempt = MY(attempt);
  key_nonce = me + 1
}

/* Release: the key becomes `next` (a reservation, dying) or is freed, and the marker becomes `mark`; met
 * is what was found. [stores/redis/lua/release.lua] [stores/transitions.py _release] */
inline release(next, mark) {
  if
  :: MINE ->
    met = OWN;
    if
    :: next == RESERVED ->
      between = MY(job) + 1;
#ifdef NO_RESERVATION
      free_key()
#else
      kind = RESERVED;
      key_attempt = 1;
      key_nonce = 0
#endif
    :: next == DYING -> kind = DYING
    :: else -> free_key()
    fi
  :: !MINE && SAME_ATTEMPT && kind != RESERVED -> met = DUPLICATE
  :: !MINE && !(SAME_ATTEMPT && kind != RESERVED) ->
    met = (MY_MARKER.state == DONE -> DROPPED : OTHER)
  fi;
  if
  :: mark != UNKNOWN && (met != DUPLICATE || mark == DONE) ->
    if
    :: mark == DONE -> over[MY_ATTEMPT] = 1
    :: else
    fi;
    MY_MARKER.state = (MY_MARKER.state == DONE -> DONE : mark);
    MY_MARKER.sequence = (MY_MARKER.state == DONE -> 0 : MY_MARKER.sequence)
  :: else
  fi
}

/* Publish a message; it is stored in `slot`. */
inline publish(job_, attempt_, sequence_, started_) {
  slot = 0;
  do
  :: slot < COPIES && (copy[slot].state != NONE || ANY(REFERS)) -> slot++
  :: else -> break
  od;
  assert(slot < COPIES);
  copy[slot].job = job_;
  copy[slot].attempt = attempt_;
  copy[slot].sequence = sequence_;
  copy[slot].started = started_;
  copy[slot].state = READY;
  slot = 0
}

/* Only the order of the copies' numbers matters: close the gaps, so that they stay small. */
#define USES(i) (i.job == whose && i.attempt == which && i.sequence == v)
inline close_gaps(whose, which) {
  v = COPIES + 1;
  do
  :: v > 1 ->
    v--;
    slot = 0;
    do
    :: slot < COPIES && !USES(copy[slot]) -> slot++
    :: else -> break
    od;
    if
    :: slot < COPIES || marker[whose * ATTEMPTS + which].sequence == v
    :: else ->
      slot = 0;
      do
      :: slot < COPIES ->
        if
        :: copy[slot].job == whose && copy[slot].attempt == which && copy[slot].sequence > v -> copy[slot].sequence--
        :: else
        fi;
        slot++
      :: else -> break
      od;
      if
      :: marker[whose * ATTEMPTS + which].sequence > v -> marker[whose * ATTEMPTS + which].sequence--
      :: else
      fi
    fi
  :: else -> break
  od;
  slot = 0;
  v = 0
}

#define HAS(slot, j) (copy[slot].state != NONE && copy[slot].job == j)
#define KEPT(j) (done[j] || HAS(0, j) || HAS(1, j) || HAS(2, j) || HAS(3, j) || HAS(4, j) || HAS(5, j))

/* Acknowledge the delivery: the broker deletes its message, unless it waits to be delivered again. */
inline acknowledge() {
  MY(state) = (MY(state) == UNACKED -> NONE : MY(state))
}

/* No job is lost: the broker has a message of each job that is not done, even if all processes die. */
inline leave() {
  slot = child[me].copy - 1;
  child[me].copy = 0;
  child[me].at = IDLE;
  child[me].started = 0;
  child[me].trusts = 0;
  key_nonce = (key_nonce == me + 1 -> 0 : key_nonce);
  if
  :: copy[slot].state == NONE && !ANY(REFERS) ->
    copy[slot].job = 0;
    copy[slot].attempt = 0;
    copy[slot].sequence = 0;
    copy[slot].started = 0
  :: else
  fi;
  slot = 0;
  assert(KEPT(0) && KEPT(1))
}

inline leave_soon() {
  met = 0;
  child[me].trusts = 0;
  child[me].at = LEAVING
}

/* The message of a dead child is requeued, by its parent or by the broker. */
inline requeue() {
  if
  :: MY(state) == UNACKED ->
    MY(state) = READY;
    MY(started) = 1
  :: else
  fi
}

/* The position of a message has no meaning: sort them, so that positions add no states. */
#define WEIGHT(i) ((copy[i].state != NONE || ANY_REFERS(i)) * 1024 + copy[i].state * 256 + copy[i].job * 128 + copy[i].attempt * 64 + copy[i].sequence * 2 + copy[i].started)
#define ANY_REFERS(i) (child[0].copy == i + 1 || child[1].copy == i + 1)
#define FOLLOW(i) child[i].copy = (child[i].copy == slot + 1 -> slot + 2 : (child[i].copy == slot + 2 -> slot + 1 : child[i].copy))
#define SWAP(field) v = copy[slot].field; copy[slot].field = copy[slot + 1].field; copy[slot + 1].field = v
inline sort() {
  met = COPIES - 1;
  do
  :: met > 0 ->
    slot = 0;
    do
    :: slot < met ->
      if
      :: WEIGHT(slot) < WEIGHT(slot + 1) ->
        SWAP(state);
        SWAP(job);
        SWAP(attempt);
        SWAP(sequence);
        SWAP(started);
        FOLLOW(0);
        FOLLOW(1)
      :: else
      fi;
      slot++
    :: else -> break
    od;
    met--
  :: else -> break
  od;
  slot = 0;
  v = 0
}

inline requeue_copy(started_) {
  child[me].started = started_;
  child[me].trusts = 0;
  child[me].at = PUTTING_BACK
}

#define TAKE_FROM(which) \
  :: d_step { child[me].at == IDLE && copy[which].state == READY -> \
      copy[which].state = UNACKED; \
      child[me].copy = which + 1; \
      child[me].started = (copy[which].started || copy[which].attempt > 0); \
      child[me].at = ARRIVED; \
      sort() }

/* If its own duplicate has the lease, or has finished, the duplicate writes the result. */
inline yield_to_duplicate() {
  if
#ifdef DUPLICATE_TAKES_ALL
  :: met == DUPLICATE || met == DROPPED -> child[me].at = LEAVING
#else
  :: met == DROPPED -> child[me].at = LEAVING
  :: met == DUPLICATE -> requeue_copy(1)
#endif
  :: else
  fi;
  met = 0
}

#ifdef SKIP_STARTED
#define IS_SKIPPED (skips[MY(job)])
#else
#define IS_SKIPPED (skips[MY(job)] && !child[me].started)
#endif

#ifdef ACK_FIRST
#define IN_ORDER (MY(state) != UNACKED)
#else
#define IN_ORDER true
#endif

#define HOLDS(i) (key_nonce == i + 1 && child[i].trusts)
#define TRUSTED ANY(HOLDS)
#define IS_DOOMED(i) (key_nonce == i + 1 && child[i].at == DOOMED)
#define STILL_DYING ANY(IS_DOOMED)

proctype life(byte me) {
end:
  do
  /* A delivery arrives and gets a nonce. [worker/request.py SingletonRequestMixin.__init__] [message/header.py Delivery.of] */
  TAKE_FROM(0)
  TAKE_FROM(1)
  TAKE_FROM(2)
  TAKE_FROM(3)
  TAKE_FROM(4)
  TAKE_FROM(5)

  /* The store replies to the acquire, and the conflict table decides. [task/acquire.py acquire] [task/conflict.py decide] */
  :: d_step { child[me].at == ARRIVED ->
      relate();
      if
      :: met == OWN ->
        assert(!ANY(RUNS));
        assert(!over[MY_ATTEMPT]);
        grant();
        child[me].trusts = 1;
#ifdef CANCELS
        child[me].at = GRANTED
#else
        began[MY(job)] = 1;
        child[me].started = 1;
        child[me].at = BODY
#endif
      :: met == DROPPED -> child[me].at = LEAVING
      :: met == EARLIER || met == DUPLICATE -> requeue_copy(1)
#ifdef CANCELS
      :: met == OTHER -> child[me].at = REFUSED
#else
      :: met == OTHER && IS_SKIPPED ->
        done[MY(job)] = (began[MY(job)] -> done[MY(job)] : 1); /* work that began is not ended by a skip */
        child[me].at = LEAVING
      :: met == OTHER && !IS_SKIPPED -> requeue_copy(child[me].started)
#endif
      fi;
      met = 0 }

#ifdef CANCELS
  /* The call is noted as the newest, and the body begins; or there is a newer call. [task/cancel_running.py CancelRunningFeature.granted] [task/cancel_running.py CallOrder.register] [stores/redis/lua/newest_call.lua] */
  :: d_step { child[me].at == GRANTED ->
      if
#ifdef NOTED_IF_REFUSED
      :: true ->
#else
      :: IS_OLDER ->
        done[MY(job)] = 1;
        child[me].at = CANCELLED
      :: !IS_OLDER ->
        newest = MY(job) + 1;
#endif
        /* An older call never begins after a newer one. */
        assert(MY(job) > 0 || !began[1]);
        began[MY(job)] = 1;
        child[me].started = 1;
        child[me].at = BODY
      fi }

  /* No reply to the note: the lease is released, and the message requeued. [task/acquire.py _notify_of_grant] [task/acquire.py _retain] */
  :: d_step { child[me].at == GRANTED && faults > 0 ->
      faults--;
      release(FREE, UNKNOWN);
      met = 0;
      requeue_copy(child[me].started) }

  /* The lease of a call that did not begin is released. [task/cancel_running.py CancelRunningFeature._end] [task/run.py TaskRun.end_for_good] */
  :: d_step { child[me].at == CANCELLED ->
      release(FREE, UNKNOWN);
      leave_soon() }

  /* A refused call is noted as the newest, replaces a reservation, and waits; or there is a newer call. [task/cancel_running.py CancelRunningFeature.refused] [task/cancel_running.py CallOrder.register] [task/cancel_running.py CallOrder.reservation] [stores/redis/lua/newest_call.lua] */
  :: d_step { child[me].at == REFUSED ->
      if
      :: IS_OLDER ->
        done[MY(job)] = 1;
        child[me].at = LEAVING
      :: !IS_OLDER ->
        newest = MY(job) + 1;
        if
#ifdef TAKES_OVER
        :: kind != FREE && key_job != MY(job) ->
#else
        :: kind == RESERVED && key_job != MY(job) ->
#endif
          between = 0;
          free_key()
        :: else
        fi;
        if
        :: child[me].started -> requeue_copy(1)
        :: !child[me].started -> child[me].at = ARRIVED
        fi
      fi }

  /* The holder finds a newer call, and its body ends, interrupted or not: REVOKED is stored under the lease. [core/newest_call_polls.py NewestCallPolls.poll] [task/cancel_running.py CallOrder.watch] [task/cancel_running.py CancelRunningFeature._end] [task/run.py TaskRun.end_for_good] */
  :: d_step { child[me].at == BODY && child[me].trusts && IS_OLDER ->
      done[MY(job)] = 1;
      child[me].at = STORED }

  /* The body raised Retry after that: the key is not reserved. [task/ending.py final_release] */
  :: d_step { child[me].at == RETRYING && child[me].trusts && IS_OLDER ->
      release(FREE, DONE);
      leave_soon() }
#endif

  /* No reply, also not to the release by token: the message is requeued. [task/acquire.py acquire] [task/requeue.py requeue] */
  :: d_step { child[me].at == ARRIVED && faults > 0 ->
      faults--;
      requeue_copy(child[me].started) }

  /* The same, but the lease was granted. [core/locker.py Locker.undo] */
  :: d_step { child[me].at == ARRIVED && faults > 0 ->
      faults--;
      relate();
      if
      :: met == OWN -> grant()
      :: else
      fi;
      met = 0;
      requeue_copy(child[me].started) }

  /* The body ends and triggers no messages: its result is stored under the lease. [task/run.py TaskRun._ended] */
  :: d_step { child[me].at == BODY && child[me].trusts ->
      done[MY(job)] = 1;
      child[me].at = STORED }

  /* The lease is released, and the attempt marked as done in the same step. [task/base.py SingletonTask.after_return] [task/ending.py final_release] [core/store_requests.py Release.of] */
  :: d_step { child[me].at == STORED ->
      release(FREE, DONE);
      leave_soon() }

  /* The body ends and triggers messages, or has lost its lease without noticing: released early. [task/run.py TaskRun._ended] [task/run.py TaskRun._release_early] */
  :: d_step { child[me].at == BODY ->
      release(FREE, FINISHING);
      child[me].trusts = 0;
      child[me].at = CALLING;
      yield_to_duplicate() }

  /* The result is stored. [task/base.py SingletonTask.after_return] */
  :: d_step { child[me].at == CALLING ->
      done[MY(job)] = 1;
      child[me].at = MARKING }

  /* The attempt is marked as done. [task/requeue.py mark] [stores/redis/lua/mark.lua] [stores/transitions.py TransitionLeases.mark] */
  :: d_step { child[me].at == MARKING ->
      MY_MARKER.state = DONE;
      MY_MARKER.sequence = 0; /* it does not matter any more */
      over[MY_ATTEMPT] = 1;
      leave_soon() }

  /* The body raises Retry, which publishes the next attempt from inside it. [environment] */
  :: d_step { child[me].at == BODY && MY(job) == 0 && MY(attempt) == 0 ->
      publish(MY(job), 1, 0, 1);
      child[me].at = RETRYING;
      sort() }

  /* The key is reserved for the next attempt, and this one marked as done. [core/store_requests.py Release.reserve] [task/ending.py final_release] */
  :: d_step { child[me].at == RETRYING && child[me].trusts ->
      release(RESERVED, DONE);
      leave_soon() }

  /* A lease that was lost meanwhile is released without a reservation, or is its duplicate's. [task/run.py TaskRun._run_under] [task/run.py TaskRun._release_early] */
  :: d_step { child[me].at == RETRYING && !child[me].trusts ->
      release(FREE, UNKNOWN);
      child[me].at = MARKING;
      yield_to_duplicate() }

  /* The lease was lost and the body interrupted: its message is requeued. [task/run.py TaskRun._interrupted] [task/run.py TaskRun._release_early] */
  :: d_step { child[me].at == BODY && !child[me].trusts ->
      release(FREE, UNKNOWN);
      requeue_copy(1);
      yield_to_duplicate() }

  /* A release, or a mark, without a reply. [core/locker.py Locker.release] [task/requeue.py mark] */
  :: d_step { (child[me].at == STORED || child[me].at == MARKING || child[me].at == RETRYING) && faults > 0 ->
      faults--;
      leave_soon() }

  /* Publish the copy before the delivery is acknowledged. [message/copy.py publish_copy] [task/requeue.py requeue] */
  :: d_step { child[me].at == PUTTING_BACK && IN_ORDER ->
      publish(MY(job), MY(attempt), MY(sequence) + 1, child[me].started);
      child[me].at = PUBLISHED;
      sort() }

#ifdef ACK_FIRST
  :: d_step { child[me].at == PUTTING_BACK && MY(state) == UNACKED ->
      acknowledge();
      sort() }
#endif

  /* Mark older copies as superseded. [task/requeue.py _publish_copy] [stores/redis/lua/mark.lua] [stores/transitions.py TransitionLeases.mark] */
  :: d_step { child[me].at == PUBLISHED ->
      MY_MARKER.state = (MY_MARKER.state == UNKNOWN -> WAITING : MY_MARKER.state);
      if
      :: MY_MARKER.state != DONE && MY_MARKER.sequence <= MY(sequence) -> MY_MARKER.sequence = MY(sequence) + 1
      :: else
      fi;
      close_gaps(MY(job), MY(attempt));
      leave_soon();
      sort() }

  /* That mark gets no reply. [task/requeue.py _publish_copy] */
  :: d_step { child[me].at == PUBLISHED && faults > 0 ->
      faults--;
      leave_soon() }

  /* The delivery ends. [environment] */
  :: d_step { child[me].at == LEAVING ->
      acknowledge();
      leave();
      sort() }

  /* The holder stalls, and its deadline passes. [core/heartbeat.py Heartbeat._declare_overdue] */
  :: d_step { child[me].trusts && child[me].at != DOOMED && faults > 0 ->
      faults--;
      child[me].trusts = 0 }

  /* The hard time limit is announced; the body still runs for a while. [worker/request.py SingletonRequestMixin.on_timeout] [worker/dead_child.py release_leases] */
  :: d_step { child[me].at == BODY && faults > 0 ->
      faults--;
#ifdef RELEASE_ON_ANNOUNCEMENT
      release(FREE, UNKNOWN);
#else
      release(DYING, UNKNOWN);
#endif
      met = 0;
      child[me].at = DOOMED }

  /* The child is killed; its failure is stored, and acknowledges the message. [environment] */
  :: d_step { child[me].at == DOOMED ->
      done[MY(job)] = 1;
      leave_soon() }

  /* SIGKILL. [environment] */
  :: d_step { child[me].at != IDLE && child[me].at != DEAD && faults > 0 ->
      faults--;
      child[me].trusts = 0;
      child[me].at = DEAD }

  /* The parent has proof of the death, and releases by token before the message is requeued. [worker/request.py SingletonRequestMixin.on_failure] [worker/dead_child.py release_leases] */
  :: d_step { child[me].at == DEAD ->
      release(FREE, UNKNOWN);
      met = 0;
      requeue();
      leave();
      sort() }

  /* The parent is dead too, or gets no reply; the broker requeues the message. [environment] */
  :: d_step { child[me].at == DEAD ->
      requeue();
      leave();
      sort() }
  od
}

#define FINISHING_EXPIRES(which) \
  :: d_step { marker[which].state == FINISHING -> \
      marker[which].state = UNKNOWN; \
      marker[which].sequence = 0 }
#ifdef SLOW_TO_BEGIN
#define DUE(which) true
#else
#define FRESH(i, which) (child[i].copy == which + 1 && !child[i].started)
#define DUE(which) (!FRESH(0, which) && !FRESH(1, which))
#endif
#define DELIVER_AGAIN(which) \
  :: d_step { copy[which].state == UNACKED && faults > 0 && DUE(which) -> \
      faults--; \
      copy[which].state = READY; \
      copy[which].started = 1; \
      sort() }

/* The steps that no process makes. */
proctype passing() {
end:
  do
  /* A lease that no child trusts, a reservation, or the key of a killed process expires. [environment] */
  :: d_step { (kind == LEASE && !TRUSTED) || kind == RESERVED || (kind == DYING && !STILL_DYING) ->
      between = (kind == RESERVED -> 0 : between);
      free_key() }

  /* A marker "finishing" expires. [environment] */
  FINISHING_EXPIRES(0)
  FINISHING_EXPIRES(1)
  FINISHING_EXPIRES(2)

  /* The visibility timeout has passed: the broker delivers again a message that is still being processed. [environment] */
  DELIVER_AGAIN(0)
  DELIVER_AGAIN(1)
  DELIVER_AGAIN(2)
  DELIVER_AGAIN(3)
  DELIVER_AGAIN(4)
  DELIVER_AGAIN(5)
  od
}

init {
  atomic {
#ifdef SKIPS
    skips[0] = 1;
    skips[1] = 1;
#endif
    copy[0].state = READY;
    copy[1].state = READY;
    copy[1].job = 1;
    run passing();
    run life(0);
    run life(1)
  }
}

#ifdef LIVENESS
/* Every job is done in the end, after finitely many faults. */
ltl every_job_is_done { <> (done[0] && done[1]) }
#endif

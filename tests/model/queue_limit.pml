/* The queue of one key of which two calls may run at a time: three calls and their publishers, two workers,
 * the sweep, a foreign holder of one of the two slots. queue.pml has one call at a time, and retries, results,
 * pauses, rates and losses of the store.
 *
 * [environment] marks what happens to the protocol.
 *
 * The front is the first LIMIT calls of the queue. A call may begin if it is in the front, each call before it
 * has begun, and a slot is free. One call that has not begun is hinted at a time.
 *
 * Guarantees. The numbers are those of the assertions and claims below; those of queue.pml where they are the same.
 *  1 exclusion: LIMIT bodies at a time, the foreign holder's too.
 *  2 order: a call begins after each call that joined before it has begun or ended.
 *  3 a call that has joined is in the queue (a running one too) or has ended.
 *  4 no call begins after it has ended; one that is acknowledged early begins at most once.
 *  5 while a slot is free, the next call to begin is hinted, also if no body ends.
 *  6 a queue that is not empty is due for a sweep.
 *  7 no message is discarded whose call is not in the queue and has not ended.
 * 17 one call that has not begun is hinted at a time.
 * 18 no call begins while LIMIT calls before it are in the queue.
 *
 * Non-guarantees. A begin is the grant of the lease: if the worker dies before the body, the body of a later
 * call may be the first that runs. A message that is acknowledged early is lost when its worker dies before it
 * joins, as without a queue. Calls that have begun have no order: one that begins again may get its slot after
 * a call behind it. Left to tests of the code: a limit that changes, an acquire without a reply.
 *
 * State model. Calls are numbered in the order in which they join, so the number of a call is its place. Slots
 * are alike, so they are counted; the lease of a call is in one of them. Scripts are atomic. There is no time:
 * a deadline may pass at any moment, so a sweep may come at any moment, and looks at one call. A lease ends
 * when it is released or its holder is dead. A second copy of a message is not kept at the broker; the store
 * counts copies, so a call that was published twice may wait or stay hinted when a copy is dropped. LATE:
 * messages are acknowledged late. DIRECT: a message is sent without a join, and joins at a worker. ENDLESS: a
 * body may go on forever.
 *
 * Failure handling. FAULTS bounds, together: a publisher or worker that dies at any step, a join or end
 * without a reply, a publish that the broker refuses, a lost message. The parent of a dead child has no step of
 * its own here: it makes the queue due. So a hint that a child had yet to publish is left to the sweep.
 *
 * Must-fail variants, each a protection taken out: NO_TURN, NO_FRONT, SLOTS_UNCHECKED, NO_HINT_AT_GRANT (with
 * no sweep for it), HINT_AT_RELEASE_ONLY, NO_SWEEP, BEGUN_UNCHECKED, BEHIND_IS_HINTED, JOIN_UNPLANNED.
 * WITNESS is no protection: it states that the three calls never all end with two bodies at once and all faults
 * spent, which is false.
 */

#ifndef FAULTS
#define FAULTS 1
#endif

#define CALLS 3
#define LIMIT 2
#define NO_CALL 3

/* The state of an entry. */
#define ABSENT 0
#define WAITING 1
#define HINTED 2
#define BEGUN 3
#define LEAVING 4 /* it never begins again, and is taken out */

/* The lease of a call, and that of the foreign holder; leases are those of [core/lease.py Kind] */
#define NONE 0
#define HELD 1
#define ORPHAN 2 /* its worker is dead */
#define OVER 3 /* the foreign holder has released it, and does not come back */

/* Where a worker is. */
#define IDLE 0
#define ARRIVED 1 /* with a message; acquire is next */
#define UNQUEUED 2 /* its call is to join */
#define DROPPING 3 /* acknowledging is next */
#define GRANTED 4 /* publishing the next call is next */
#define BODY 5
#define ENDED 6 /* the reply to the end was lost */
#define HINTING 7 /* publishing the next call is next */

/* Where a publisher is. */
#define MAKING 0
#define REPEATING 1
#define JOINED 2
#define DONE 3

#ifdef LATE
#define IS_LATE true
#else
#define IS_LATE false
#endif

typedef Worker {
  byte at;
  byte c; /* the call */
  byte reply; /* the call to hint */
};

Worker w[2];

/* The store. */
byte state[CALLS];
bit begun[CALLS]; /* kept when a call has ended, as the completion record is */
bit ended[CALLS];
bit repeated[CALLS]; /* its message was published twice */
byte lease[CALLS];
byte foreign;
bit due;

byte joined; /* how many calls have joined */
bit copies[CALLS]; /* a message is at the broker */
bit direct; /* one is, of a call that has not joined */

byte faults = FAULTS;
byte v;
#ifdef WITNESS
bit together;
#endif

#define IN(i) (state[i] != ABSENT)
#define EMPTY (!IN(0) && !IN(1) && !IN(2))
#define LENGTH (IN(0) + IN(1) + IN(2))
#define NEW(i) (IN(i) && !begun[i])
#define BEFORE(i) ((i > 0 && IN(0)) + (i > 1 && IN(1)))
#define NEW_BEFORE(i) (i > 0 && NEW(0) || i > 1 && NEW(1))
#ifdef NO_FRONT
#define FRONT(i) IN(i)
#else
#define FRONT(i) (IN(i) && BEFORE(i) < LIMIT)
#endif
#define NEXT(i) (NEW(i) && FRONT(i) && !NEW_BEFORE(i))
#ifdef NO_TURN
#define TURN(i) FRONT(i)
#else
#define TURN(i) (FRONT(i) && (begun[i] || !NEW_BEFORE(i)))
#endif
#define USED ((lease[0] != NONE) + (lease[1] != NONE) + (lease[2] != NONE) + (foreign == HELD))
#define IS_FREE (USED < LIMIT)
#ifdef SLOTS_UNCHECKED
#define IS_FULL false
#else
#define IS_FULL (!IS_FREE)
#endif
#define REFUSED(i) (IN(i) && state[i] != LEAVING && (!TURN(i) || lease[i] != NONE || IS_FULL))
#define HAS_BODY(j) (w[j].at == BODY)
#define RUNNING (HAS_BODY(0) + HAS_BODY(1))
#define HINTED_NEW(i) (state[i] == HINTED && !begun[i])
#define MYC w[me].c
#define FAULT faults > 0 -> faults--

inline verify() {
  assert(RUNNING + (foreign == HELD) <= LIMIT); /* 1 */
  assert(joined < 1 || IN(0) || ended[0]); /* 3 */
  assert(joined < 2 || IN(1) || ended[1]); /* 3 */
  assert(joined < 3 || IN(2) || ended[2]); /* 3 */
  assert(EMPTY || due); /* 6 */
  assert(HINTED_NEW(0) + HINTED_NEW(1) + HINTED_NEW(2) <= 1); /* 17 */
#ifdef WITNESS
  if :: RUNNING == 2 -> together = 1 :: else fi;
  assert(!(ended[0] && ended[1] && ended[2] && together && faults == 0))
#endif
}

/* When the queue is swept next: at once, or never if it is empty. */
inline plan() {
  due = !EMPTY
}

/* The call that is to begin next is hinted if a slot is free. */
inline hint_next() {
  v = NO_CALL;
  if
  :: NEXT(0) && state[0] == WAITING && IS_FREE -> v = 0
  :: NEXT(1) && state[1] == WAITING && IS_FREE -> v = 1
  :: NEXT(2) && state[2] == WAITING && IS_FREE -> v = 2
  :: else
  fi;
  if :: v != NO_CALL -> state[v] = HINTED :: else fi
}

inline publish_next() {
  if :: v != NO_CALL -> copies[v] = 1 :: else fi;
  v = 0
}

/* A call joins at the end: hinted, if it may begin. Behind the front, the next sweep stays as it is. */
inline join(i, to_publish) {
  joined++;
  state[i] = WAITING;
  to_publish = 0;
  if
  :: LENGTH > LIMIT
  :: LENGTH <= LIMIT ->
#ifdef BEHIND_IS_HINTED
      if :: IS_FREE -> state[i] = HINTED; to_publish = 1 :: else fi;
#else
      if :: NEXT(i) && IS_FREE -> state[i] = HINTED; to_publish = 1 :: else fi;
#endif
#ifndef JOIN_UNPLANNED
      plan()
#endif
  fi
}

inline take_out(i) {
  state[i] = ABSENT;
  repeated[i] = 0;
  ended[i] = 1
}

/* The end of a call by its worker: its slot is free, and the next call is hinted. */
inline end_it() {
  lease[MYC] = NONE;
  take_out(MYC);
  hint_next();
  w[me].reply = v;
  v = 0;
  plan()
}

inline grant() {
  assert(!ended[MYC]); /* 4 */
  assert(IS_LATE || !begun[MYC]); /* 4 */
  assert(MYC < 1 || begun[0] || ended[0]); /* 2 */
  assert(MYC < 2 || begun[1] || ended[1]); /* 2 */
  assert(BEFORE(MYC) < LIMIT); /* 18 */
  state[MYC] = BEGUN;
  begun[MYC] = 1;
  lease[MYC] = HELD;
  w[me].at = BODY;
#if !defined(NO_HINT_AT_GRANT) && !defined(HINT_AT_RELEASE_ONLY)
  hint_next();
  w[me].reply = v;
  if :: v != NO_CALL -> w[me].at = GRANTED :: else fi;
  v = 0;
#endif
  plan()
}

inline leave() {
  w[me].at = IDLE;
  w[me].c = NO_CALL;
  w[me].reply = NO_CALL
}

inline take(i) {
  copies[i] = 0;
  w[me].c = i;
  w[me].at = ARRIVED
}

proctype publisher(byte me) {
  byte at, r;
end:
  do
  /* No further call is made. [environment] */
  :: d_step { at == MAKING && joined == me -> at = DONE }
  /* It joins: one script. [stores/redis/lua/queue_join.lua] */
  :: d_step { at == MAKING && joined == me -> join(me, r); at = (r -> JOINED : DONE); verify() }
  /* The reply to the join is lost, and it is repeated. [stores/redis/lua/queue_join.lua] */
  :: d_step { at == MAKING && joined == me && FAULT; join(me, r); r = 0; at = REPEATING; verify() }
  :: d_step { at == REPEATING -> r = (state[me] == HINTED); at = (r -> JOINED : DONE) }
  /* The reply says to publish the hint. [key_queue/join.py joining] */
  :: d_step { at == JOINED -> copies[me] = 1; r = 0; at = DONE }
  /* The broker refuses the hint: withdrawn if it has not begun. [stores/redis/lua/queue_remove.lua] */
  :: d_step { at == JOINED && FAULT;
      r = 0;
      at = DONE;
      if
      :: NEW(me) -> take_out(me); hint_next(); publish_next(); plan()
      :: else
      fi;
      verify() }
  /* The same, and the next call waits for another reason. [stores/redis/lua/queue_remove.lua] */
  :: d_step { at == JOINED && NEW(me) && FAULT; r = 0; at = DONE; take_out(me); plan(); verify() }
  /* The publisher is killed. [environment] */
  :: d_step { (at == REPEATING || at == JOINED) && FAULT; r = 0; at = DONE }
  od
}

proctype worker(byte me) {
end:
  do
  /* A message is delivered. [environment] */
  :: d_step { w[me].at == IDLE && copies[0] -> take(0) }
  :: d_step { w[me].at == IDLE && copies[1] -> take(1) }
  :: d_step { w[me].at == IDLE && copies[2] -> take(2) }
#ifdef DIRECT
  :: d_step { w[me].at == IDLE && direct && joined < CALLS -> direct = 0; w[me].at = ARRIVED }
  /* A call that has not joined begins, or is to join. [stores/redis/lua/queue_acquire.lua] */
  :: d_step { w[me].at == ARRIVED && MYC == NO_CALL ->
      if
      :: LENGTH < LIMIT && !NEW(0) && !NEW(1) && !NEW(2) && IS_FREE && joined < CALLS ->
          MYC = joined;
          joined++;
          grant()
      :: else -> w[me].at = UNQUEUED
      fi;
      verify() }
  /* It joins at the worker, and asks again if it may begin. [stores/redis/lua/queue_join.lua] */
  :: d_step { w[me].at == UNQUEUED && joined < CALLS ->
      MYC = joined;
      join(MYC, v);
      w[me].at = (v -> ARRIVED : DROPPING);
      v = 0;
      verify() }
  /* A fourth call is none of the model's. [environment] */
  :: d_step { w[me].at == UNQUEUED && joined == CALLS -> leave() }
#endif
  /* It asks for a slot: dropped, ended as lost, or granted. [stores/redis/lua/queue_acquire.lua] */
  :: d_step { w[me].at == ARRIVED && MYC != NO_CALL ->
      assert(IN(MYC) || ended[MYC]); /* 7 */
      if
      :: !IN(MYC) || state[MYC] == LEAVING -> leave()
      :: REFUSED(MYC) ->
          if :: state[MYC] == HINTED -> state[MYC] = WAITING :: else fi;
          plan();
          leave()
#ifndef BEGUN_UNCHECKED
      :: !REFUSED(MYC) && state[MYC] == BEGUN && !IS_LATE -> state[MYC] = LEAVING; plan(); leave()
#endif
      :: else -> grant()
      fi;
      verify() }
  /* It is dropped, and the store knows of another copy: it stays hinted. [stores/redis/lua/queue_acquire.lua] */
  :: d_step { w[me].at == ARRIVED && MYC != NO_CALL && REFUSED(MYC) && state[MYC] == HINTED && repeated[MYC] -> leave() }
  /* The message of a call that waits is acknowledged. [key_queue/feature.py QueueFeature.refused] */
  :: d_step { w[me].at == DROPPING -> leave() }
  /* The next call of the grant is published; then the body begins. [key_queue/feature.py QueueFeature.granted] */
  :: d_step { w[me].at == GRANTED ->
      v = w[me].reply;
      publish_next();
      w[me].reply = NO_CALL;
      w[me].at = BODY;
      verify() }
#ifdef ENDLESS
  /* The body goes on. [environment] */
  :: w[me].at == BODY -> skip
#endif
  /* The body ends, and the call with it: one script. [stores/redis/lua/queue_release.lua] */
  :: d_step { w[me].at == BODY -> end_it(); w[me].at = HINTING; verify() }
  /* The reply to the end is lost, and it is repeated. [stores/redis/lua/queue_release.lua] */
  :: d_step { w[me].at == BODY && FAULT; end_it(); w[me].at = ENDED; verify() }
  :: d_step { w[me].at == ENDED ->
      if
      :: w[me].reply != NO_CALL && state[w[me].reply] != HINTED -> w[me].reply = NO_CALL
      :: else
      fi;
      w[me].at = HINTING }
  /* The hint of the next is published. [key_queue/hint.py publish_hint] */
  :: d_step { w[me].at == HINTING -> v = w[me].reply; publish_next(); leave() }
  /* SIGKILL of the child. [environment] */
  :: d_step { w[me].at != IDLE && FAULT;
      if
      :: IS_LATE && MYC != NO_CALL -> copies[MYC] = 1
      :: IS_LATE && MYC == NO_CALL -> direct = 1
      :: else
      fi;
      if :: w[me].at == GRANTED || w[me].at == BODY -> lease[MYC] = ORPHAN :: else fi;
      leave() }
  od
}

#ifndef NO_SWEEP
/* The sweep, of one of the calls. */
proctype look(byte i) {
end:
  do
  /* A call has begun, and its lease has ended: it is lost, or hinted again. [stores/redis/lua/queue_sweep.lua] */
  :: d_step { due && FRONT(i) && state[i] == BEGUN && lease[i] == NONE && !IS_LATE -> state[i] = LEAVING; plan() }
  :: d_step { due && FRONT(i) && begun[i] && state[i] != LEAVING && lease[i] == NONE && IS_LATE && IS_FREE ->
      repeated[i] = 1;
      state[i] = HINTED;
      copies[i] = 1;
      plan();
      verify() }
  /* A lost call has a result: it is taken out, and the next is hinted. [key_queue/sweep.py QueueSweep._remove] */
  :: d_step { due && state[i] == LEAVING -> take_out(i); hint_next(); publish_next(); plan(); verify() }
  /* The same, and the next call waits for another reason. [stores/redis/lua/queue_remove.lua] */
  :: d_step { due && state[i] == LEAVING -> take_out(i); plan(); verify() }
#ifndef HINT_AT_RELEASE_ONLY
  /* The hint of a call that has not begun is late. [stores/redis/lua/queue_sweep.lua] */
  :: d_step { due && NEXT(i) && state[i] == HINTED && IS_FREE -> repeated[i] = 1; copies[i] = 1; plan() }
#ifndef NO_HINT_AT_GRANT
  /* The next call waits, and a slot is free. [stores/redis/lua/queue_sweep.lua] */
  :: d_step { due && NEXT(i) && state[i] == WAITING && IS_FREE -> state[i] = HINTED; copies[i] = 1; plan(); verify() }
#endif
#endif
  od
}
#endif

proctype environment() {
end:
  do
  /* The lease of a dead worker ends, or its parent releases it. [environment] */
  :: d_step { lease[0] == ORPHAN -> lease[0] = NONE }
  :: d_step { lease[1] == ORPHAN -> lease[1] = NONE }
  :: d_step { lease[2] == ORPHAN -> lease[2] = NONE }
  /* Another client takes a slot. [environment] */
  :: d_step { IS_FREE && foreign == NONE -> foreign = HELD; verify() }
  /* It releases the slot, and does not notify the queue. [environment] */
  :: d_step { foreign == HELD -> foreign = OVER }
  /* The broker loses a message. [environment] */
  :: d_step { copies[0] && FAULT; copies[0] = 0 }
  :: d_step { copies[1] && FAULT; copies[1] = 0 }
  :: d_step { copies[2] && FAULT; copies[2] = 0 }
  od
}

init {
  atomic {
    w[0].c = NO_CALL;
    w[1].c = NO_CALL;
    w[0].reply = NO_CALL;
    w[1].reply = NO_CALL;
#ifdef DIRECT
    direct = 1;
#endif
    run publisher(0);
    run publisher(1);
    run publisher(2);
    run worker(0);
    run worker(1);
#ifndef NO_SWEEP
    run look(0);
    run look(1);
    run look(2);
#endif
    run environment()
  }
}

#ifdef LIVENESS
/* Every call in the queue leaves it. */
ltl every_call_ends { [] (IN(0) -> <> !IN(0)) && [] (IN(1) -> <> !IN(1)) && [] (IN(2) -> <> !IN(2)) }
#endif
#ifdef HINTS
/* 5. The next call does not wait unhinted while a slot is free. */
#define UNHINTED(i) (NEXT(i) && state[i] == WAITING && IS_FREE)
#define IS_UNHINTED (UNHINTED(0) || UNHINTED(1) || UNHINTED(2))
ltl the_next_is_hinted { [] (IS_UNHINTED -> <> !IS_UNHINTED) }
#endif

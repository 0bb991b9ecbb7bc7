/* The queue of one key: two calls, of which the first retries once; two publishers, two workers and
 * their parents, the sweep, a foreign holder of the key. The store is the queue, the broker carries hints.
 *
 * [environment] marks what happens to the protocol.
 *
 * Guarantees. The numbers are those of the assertions and claims below.
 *  1 exclusion: one body at a time.
 *  2 order: a call that was made after another call had returned begins after that one has ended.
 *  3 a call that has returned is in the queue (a running one too) or has ended.
 *  4 no call begins after it has ended; an attempt that is acknowledged early begins at most once.
 *  5 while the queue is not empty and its key is free, its head is hinted, without a further publish.
 *  6 a queue that is not empty is due for a sweep.
 *  7 no message is discarded without a done marker or an entry.
 *  8 no attempt begins after a newer one.
 *  9 a call that has raised never begins.
 * 10 a foreign release, of which the queue is not notified, does not stop it.
 * 13 a call that was taken out has a result, or has raised.
 * 15 no call begins while its key is paused, also one that is sent without a join; none of them is lost.
 * 16 no call begins before the rate of its key lets it; none of them is lost.
 * And a hint that a dead child had yet to publish stands in its note, for its parent.
 *
 * Non-guarantees. A loss of the store's last writes: 2, 3, 4, 8 and 9 are void from then on; the others
 * stand. Concurrent calls have no order. A message without an entry that is acknowledged early is lost when
 * its worker dies before it joins, as without a queue. A result that was stored may be followed by that of
 * a lost call, if the worker dies between its result and its end: only a first result is in the model.
 * Left to tests of the code: how many copies a hint may have (11),
 * that an error of the queue never fails a release (12), a worker whose key differs from the publisher's
 * (14), a full store, max_waiting, min_hold, revoke and expires. A call that has begun as often as it may
 * (max_crashes) is ended as one that was acknowledged early; BOUNDED allows one begin of each attempt.
 *
 * State model. Scripts are atomic. There is no time: a deadline may pass at any moment, so a sweep may
 * come at any moment. A lease ends when it is released or its holder is dead (lease.pml shows the rest); a loss
 * of a lease that is held is in lease.pml as well. A third identical copy of a message is not kept.
 * Numbers begin again when the queue is empty, which only bounds them. LATE: messages are acknowledged
 * late. DIRECT: the first call is sent without a join, as by another publisher, and so joins at a worker.
 * OPERATOR: an operator takes a call out. PAUSE: one pauses the key, once, and resumes it. RATE: after each
 * begin, a time passes until the next call may begin: first too long for a delayed message, then not.
 * A delayed message may arrive at any moment, also too early.
 *
 * Failure handling. FAULTS bounds, together: a publisher or worker that dies at any step, a join or end
 * without a reply, a publish that the broker refuses, a lost message. With LOSS the store also loses an
 * entry or a marker (a failover without the last writes), or everything, once.
 *
 * Must-fail variants, each a protection taken out: HEAD_NOT_STORED, PASSED_OVER, ATTEMPT_0,
 * BEGUN_UNCHECKED, NOTE_ERASED_EARLY, ABSENT_IS_ENDED, NO_HEAD_CHECK, NO_SWEEP, LAST_PLUS_ONE,
 * PAUSE_AT_HINT, PAUSED_DROPPED, SWEPT_ONCE, RATE_AT_HINT, RATE_NOT_TAKEN, RATED_DROPPED, RATE_NOT_DUE,
 * JOIN_IN_TWO, END_WITHOUT_TOKEN, WITHDRAW_WITHOUT_MARKER, RETRY_OVERWRITES, RESULT_LAST. WITNESS is no
 * protection: it states that the two calls never both end with all faults spent, which is false.
 */

#ifndef FAULTS
#define FAULTS 1
#endif

/* The state of an entry; the scripts write RETRYING as waiting, with the lease still held. */
#define ABSENT 0
#define WAITING 1
#define HINTED 2
#define BEGUN 3
#define RETRYING 4
#define LEAVING 5 /* it never begins again; its result is stored, then it is taken out */

/* The holder of the key: a worker (1 and up), or; leases are those of [core/lease.py Kind] */
#define FREE 0
#define FOREIGN 8
#define ORPHAN 9 /* a dead worker */

#define NO_CALL 2 /* neither call */

/* Where a worker is. */
#define IDLE 0
#define ARRIVED 1 /* with a message; acquire is next */
#define BODY 2
#define RETRY 3 /* the next attempt is stored; publishing it is next */
#define RELEASING 4
#define ENDING 5 /* the result is stored */
#define HINTING 6 /* the key is free; publishing the hint of the reply is next */
#define CLOSING 7 /* storing that the call was lost is next */
#define DELAYED 8 /* refused by the rate; publishing the message again is next */

/* How long the rate lets no call begin: at 0 one may; NEAR, a message may be delayed by as much. */
#define NEAR 1
#define FAR 2

/* Where a publisher is. */
#define MAKING 0
#define CALLED 1
#define JOINED 2
#define OVER 3
#define HALF_JOINED 4

#ifdef LATE
#define IS_LATE true
#else
#define IS_LATE false
#endif

/* Whether an attempt begins at most once. */
#ifdef BOUNDED
#define IS_BOUNDED true
#else
#define IS_BOUNDED (!IS_LATE)
#endif

typedef Worker {
  byte at;
  byte c; /* the call */
  byte a; /* its attempt */
  byte reply; /* of the end: the call to hint */
  bit again; /* the end was sent, and its reply was lost */
};

Worker w[2];

/* The store, of each call. */
byte state[2];
byte number[2];
byte stored[2]; /* the attempt of the stored message */
byte begun[2]; /* attempts that have begun */
bit marker[2];

/* The store, of the key. */
byte key;
byte last; /* the last number */
bit due;
byte served; /* of LAST_PLUS_ONE */
byte left; /* of RATE */

byte copies[4]; /* messages at the broker, of each call and attempt */
byte noted[2]; /* the hint that a child owes */

byte faults = FAULTS;
bit lost, foreigner;
byte removing = NO_CALL;
bit operated;
bit paused, was_paused;
bit spent; /* a call has begun, and the next one may not yet */
byte v;

/* What has happened. */
bit called_after[2]; /* it was called when the other one had returned */
bit returned[2], raised[2], ended[2], result[2];
bit once[4]; /* the attempt has begun, acknowledged early */

#define O(i) (1 - (i))
#define IN(i) (state[i] != ABSENT)
#define EMPTY (!IN(0) && !IN(1))
#ifdef LAST_PLUS_ONE
#define HEAD(i) (IN(i) && number[i] == served + 1)
#define SERVED(n) (n)
#else
#define HEAD(i) (IN(i) && (!IN(O(i)) || number[O(i)] > number[i]))
#define SERVED(n) 0
#endif
#ifdef END_WITHOUT_TOKEN
#define OWNS true
#else
#define OWNS (key == me + 1)
#endif
#define RUNS(j) (w[j].at == BODY)
#define MYC w[me].c
#define FAULT faults > 0 -> faults--

inline publish(i, att) {
  if
  :: copies[(i) * 2 + (att)] < 2 -> copies[(i) * 2 + (att)]++
  :: else
  fi
}

inline verify() {
#ifndef LAST_PLUS_ONE
  if :: EMPTY -> last = 0 :: else fi;
#endif
  assert(!(RUNS(0) && RUNS(1))); /* 1 */
  assert(!returned[0] || IN(0) || ended[0] || lost); /* 3 */
  assert(!returned[1] || IN(1) || ended[1] || lost); /* 3 */
  assert(EMPTY || due); /* 6 */
  assert(!ended[0] || result[0] || raised[0]); /* 13 */
  assert(!ended[1] || result[1] || raised[1]); /* 13 */
#ifdef WITNESS
  assert(!(ended[0] && ended[1] && faults == 0))
#endif
}

/* An entry that is there keeps its number; a newer attempt replaces its message. */
inline join(i, att, to_publish) {
  if
  :: marker[i] -> to_publish = 0
  :: !marker[i] && IN(i) ->
      stored[i] = (stored[i] > att -> stored[i] : att);
      to_publish = (state[i] == HINTED)
  :: else ->
      last++;
      number[i] = last;
      stored[i] = att;
      due = 1;
      state[i] = WAITING;
      to_publish = 0;
      if
      :: HEAD(i) && key == FREE ->
          state[i] = HINTED;
          to_publish = 1;
#ifdef HEAD_NOT_STORED
          state[i] = ABSENT;
          number[i] = 0
#endif
      :: else
      fi
  fi
}

inline take_out(i) {
  state[i] = ABSENT;
  number[i] = 0;
  begun[i] = 0;
  stored[i] = 0;
  marker[i] = 1;
  ended[i] = 1
}

inline hint_next() {
  v = NO_CALL;
  if
  :: key == FREE && HEAD(0) && state[0] != LEAVING -> state[0] = HINTED; v = 0
  :: key == FREE && HEAD(1) && state[1] != LEAVING -> state[1] = HINTED; v = 1
  :: else
  fi
}

inline publish_next() {
  if :: v != NO_CALL -> publish(v, stored[v]) :: else fi;
  v = 0
}

/* The end of a call by its worker: compare the token, take out, hint, or leave that to a look if the rate lets
 * no call begin for long. Sent again, its reply is the same. */
inline end_it() {
  if
  :: OWNS ->
      key = FREE;
      served = SERVED(number[MYC]);
      take_out(MYC);
      if :: left < FAR -> hint_next() :: else -> v = NO_CALL fi;
      w[me].reply = v;
      v = 0;
#ifndef NOTE_ERASED_EARLY
      noted[me] = w[me].reply
#endif
  :: else
  fi
}

inline leave() {
  w[me].at = IDLE;
  w[me].c = 0;
  w[me].a = 0;
  w[me].reply = NO_CALL;
  w[me].again = 0
}

inline take(i, att) {
  copies[i * 2 + att]--;
  w[me].c = i;
  w[me].a = att;
  w[me].at = ARRIVED
}

proctype publisher(byte me) {
  byte at, r;
end:
  do
#ifdef DIRECT
  /* A message is sent without a join. [environment] */
  :: d_step { me == 0 && at == MAKING -> at = OVER; publish(0, 0) }
#endif
  /* A call is made. [environment] */
#ifdef DIRECT
  :: d_step { me == 1 && at == MAKING -> at = CALLED; called_after[me] = returned[O(me)] }
#else
  :: d_step { at == MAKING -> at = CALLED; called_after[me] = returned[O(me)] }
#endif
  /* It joins: one script. [stores/redis/lua/queue_join.lua] */
#ifdef JOIN_IN_TWO
  :: d_step { at == CALLED -> last++; number[me] = last; state[me] = WAITING; at = HALF_JOINED; verify() }
  :: d_step { at == HALF_JOINED -> due = 1; r = 1; at = JOINED; verify() }
#else
  :: d_step { at == CALLED -> join(me, 0, r); at = JOINED; verify() }
#endif
  /* The reply to the join is lost, and it is repeated. [stores/redis/lua/queue_join.lua] */
  :: d_step { at == CALLED && FAULT; join(me, 0, r); r = 0; verify() }
  /* The reply says whether to publish the hint; the call returns. [key_queue/join.py joining] */
  :: d_step { at == JOINED ->
      if :: r -> publish(me, 0) :: else fi;
      r = 0;
      at = OVER;
      returned[me] = 1;
      verify() }
  /* The broker refuses the hint: withdrawn if it has not begun, with a marker. [stores/redis/lua/queue_remove.lua] */
  :: d_step { at == JOINED && r && FAULT;
      r = 0;
      at = OVER;
      if
      :: state[me] == WAITING || state[me] == HINTED && !begun[me] ->
          take_out(me);
#ifdef WITHDRAW_WITHOUT_MARKER
          marker[me] = 0;
#endif
          raised[me] = 1;
          hint_next();
          publish_next()
      :: else -> returned[me] = 1
      fi;
      verify() }
  /* The publisher is killed. [environment] */
  :: d_step { (at == CALLED || at == JOINED) && FAULT; r = 0; at = OVER }
  od
}

proctype worker(byte me) {
end:
  do
  /* A message is delivered. [environment] */
  :: d_step { w[me].at == IDLE && copies[0] > 0 -> take(0, 0) }
  :: d_step { w[me].at == IDLE && copies[1] > 0 -> take(0, 1) }
  :: d_step { w[me].at == IDLE && copies[2] > 0 -> take(1, 0) }
  :: d_step { w[me].at == IDLE && copies[3] > 0 -> take(1, 1) }
  /* It joins at the worker, which is killed before it has acknowledged. [stores/redis/lua/queue_join.lua] */
  :: d_step { w[me].at == ARRIVED && !marker[MYC] && !IN(MYC) && (!EMPTY || key != FREE) && FAULT;
      called_after[MYC] = returned[O(MYC)] && !ended[O(MYC)];
      join(MYC, w[me].a, v);
      v = 0;
      publish(MYC, w[me].a);
      leave();
      verify() }
  /* It asks for the key: dropped, joined, ended as lost, or granted. [stores/redis/lua/queue_acquire.lua] */
  :: d_step { w[me].at == ARRIVED ->
      if
      :: marker[MYC] -> leave()
      :: !marker[MYC] && (state[MYC] == LEAVING || IN(MYC) && w[me].a < stored[MYC]) -> leave()
#ifndef BEGUN_UNCHECKED
      :: !marker[MYC] && state[MYC] == BEGUN && !IS_LATE && key == FREE && w[me].a == stored[MYC] && stored[MYC] < begun[MYC] ->
          state[MYC] = LEAVING;
          w[me].at = CLOSING
#ifdef BOUNDED
      :: !marker[MYC] && IS_LATE && IN(MYC) && HEAD(MYC) && state[MYC] != LEAVING && key == FREE && w[me].a == stored[MYC] && stored[MYC] < begun[MYC] ->
          state[MYC] = LEAVING;
          w[me].at = CLOSING
#endif
#endif
      :: else ->
          if
#ifdef NO_HEAD_CHECK
          :: IN(MYC) && key != FREE -> leave()
#else
          :: IN(MYC) && (key != FREE || !HEAD(MYC)) -> leave()
#endif
#ifdef PAUSE
          /* Its key is paused: it joins, and this delivery ends. */
#ifndef PAUSE_AT_HINT
          :: paused && key == FREE && (EMPTY || HEAD(MYC)) ->
#ifndef PAUSED_DROPPED
              if :: !IN(MYC) -> join(MYC, w[me].a, v); v = 0 :: else fi;
#endif
              assert(marker[MYC] || IN(MYC)); /* 7 */
              if :: state[MYC] == HINTED -> state[MYC] = WAITING :: else fi;
#ifdef SWEPT_ONCE
              due = 0;
#endif
              leave()
#endif
#endif
#if defined(RATE) && !defined(RATE_AT_HINT)
          /* Its rate lets it not begin yet: it joins and asks again, is published again, or waits for a look. */
          :: left > 0 && key == FREE && (EMPTY || HEAD(MYC)) ->
              if
              :: !IN(MYC) ->
#ifdef RATED_DROPPED
                  leave();
#else
                  join(MYC, w[me].a, v);
                  v = 0;
#endif
                  assert(marker[MYC] || IN(MYC)) /* 7 */
              :: IN(MYC) && left == NEAR -> state[MYC] = HINTED; w[me].at = DELAYED
              :: else ->
                  if :: state[MYC] == HINTED -> state[MYC] = WAITING :: else fi;
#ifdef RATE_NOT_DUE
                  due = 0;
#endif
                  leave()
              fi
#endif
#ifdef ABSENT_IS_ENDED
          :: !IN(MYC) -> assert(marker[MYC] || IN(MYC)); leave() /* 7 */
#else
          :: !IN(MYC) && (!EMPTY || key != FREE) ->
              join(MYC, w[me].a, v);
              v = 0;
              assert(marker[MYC] || IN(MYC)); /* 7 */
              leave()
#endif
          :: else ->
              if :: !IN(MYC) -> join(MYC, w[me].a, v); v = 0 :: else fi;
              assert(!paused); /* 15 */
              assert(!spent); /* 16 */
              assert(!ended[MYC] || lost || raised[MYC]); /* 4 */
              assert(!IS_BOUNDED || lost || !once[MYC * 2 + w[me].a]); /* 4 */
              assert(!called_after[MYC] || ended[O(MYC)] || lost); /* 2 */
              assert(w[me].a + 1 >= begun[MYC] || lost); /* 8 */
              assert(!raised[MYC] || lost); /* 9 */
              once[MYC * 2 + w[me].a] = IS_BOUNDED;
              begun[MYC] = w[me].a + 1;
              state[MYC] = BEGUN;
              key = me + 1;
#ifdef RATE
              spent = 1;
#ifndef RATE_NOT_TAKEN
              left = FAR;
#endif
#endif
              w[me].at = BODY
          fi
      fi;
      verify() }
#ifdef RATE
  /* The message is published again, with a delay, and the copy that asked ends. [key_queue/hint.py publish_hint] */
  :: d_step { w[me].at == DELAYED -> publish(MYC, stored[MYC]); leave() }
#endif
  /* The first call retries: its entry has the newer attempt before that is published. [stores/redis/lua/queue_join.lua] */
  :: d_step { w[me].at == BODY && w[me].a == 0 && MYC == 0 ->
#ifdef RETRY_OVERWRITES
      state[0] = RETRYING;
#else
      if :: !IN(0) && !marker[0] -> join(0, 1, v); v = 0 :: else fi;
      if :: IN(0) -> state[0] = RETRYING :: else fi;
#endif
#ifndef ATTEMPT_0
      if :: IN(0) -> stored[0] = 1 :: else fi;
#endif
      w[me].at = RETRY;
      verify() }
  /* The next attempt is published. [key_queue/join.py joining] */
  :: d_step { w[me].at == RETRY -> publish(0, 1); w[me].at = RELEASING }
  /* The key is released between two attempts. [stores/redis/lua/queue_release.lua] */
  :: d_step { w[me].at == RELEASING ->
      if
      :: key == me + 1 ->
          key = FREE;
          if :: state[0] == RETRYING -> state[0] = HINTED :: else fi
      :: else
      fi;
      leave();
      verify() }
  /* The body ends, and its result is stored. [environment] */
  :: d_step { w[me].at == BODY -> result[MYC] = 1; w[me].at = ENDING }
  /* The call ends: one script. [stores/redis/lua/queue_release.lua] */
  :: d_step { w[me].at == ENDING -> end_it(); w[me].at = HINTING; verify() }
  /* The reply to the end is lost, and it is repeated. [stores/redis/lua/queue_release.lua] */
  :: d_step { w[me].at == ENDING && !w[me].again && FAULT; end_it(); w[me].again = 1; verify() }
  /* The hint of the next is published; then the note is erased. [key_queue/hint.py publish_hint] */
  :: d_step { w[me].at == HINTING ->
      if :: w[me].reply != NO_CALL -> publish(w[me].reply, stored[w[me].reply]) :: else fi;
      noted[me] = NO_CALL;
      leave() }
  /* A lost call: its result is stored, then it is taken out. [stores/redis/lua/queue_remove.lua] */
  :: d_step { w[me].at == CLOSING ->
      if
      :: state[MYC] == LEAVING -> result[MYC] = 1; take_out(MYC); hint_next(); publish_next()
      :: else
      fi;
      leave();
      verify() }
  /* SIGKILL of the child. [environment] */
  :: d_step { w[me].at != IDLE && FAULT;
      assert(w[me].reply == NO_CALL || noted[me] != NO_CALL);
      if :: IS_LATE -> publish(MYC, w[me].a) :: else fi;
      if :: key == me + 1 -> key = ORPHAN :: else fi;
      leave() }
  /* The parent publishes what its dead child owes. [key_queue/ends.py of_dead_child] */
  :: d_step { w[me].at == IDLE && noted[me] != NO_CALL ->
      if :: state[noted[me]] == HINTED -> publish(noted[me], stored[noted[me]]) :: else fi;
      noted[me] = NO_CALL }
  od
}

proctype look() {
end:
  do
#ifndef NO_SWEEP
  /* A deadline passed, the key is free: hint the head again, or end what was lost. [stores/redis/lua/queue_sweep.lua] */
  :: d_step { due && !EMPTY && key == FREE && (HEAD(0) || HEAD(1)) ->
      v = (HEAD(0) -> 0 : 1);
      if
#ifdef PASSED_OVER
      :: state[v] == HINTED && IN(O(v)) -> last++; number[v] = last; state[v] = WAITING; v = 0
#endif
      :: state[v] == LEAVING -> result[v] = 1; take_out(v); hint_next(); publish_next()
      :: state[v] == BEGUN && !IS_LATE && stored[v] < begun[v] -> state[v] = LEAVING; v = 0
      :: paused && state[v] != LEAVING && !(state[v] == BEGUN && !IS_LATE && stored[v] < begun[v]) -> v = 0
      :: else -> state[v] = HINTED; publish_next()
      fi;
      verify() }
#endif
  /* An empty queue is looked at no more. [stores/redis/lua/queue_sweep.lua] */
  :: d_step { due && EMPTY -> due = 0 }
  od
}

#ifdef OPERATOR
#define REMOVABLE(i) (state[i] == WAITING || state[i] == HINTED || state[i] == RETRYING)
proctype operator() {
end:
  do
  /* A call that is not running is marked as leaving: it never begins. [stores/redis/lua/queue_remove.lua] */
  :: d_step { !operated && REMOVABLE(0) -> operated = 1; removing = 0;
#ifdef RESULT_LAST
      take_out(0);
#endif
      if :: IN(0) -> state[0] = LEAVING :: else fi; verify() }
  :: d_step { !operated && REMOVABLE(1) -> operated = 1; removing = 1; state[1] = LEAVING; verify() }
  /* Its result is stored, before it is taken out. [stores/redis/lua/queue_remove.lua] */
  :: d_step { removing != NO_CALL && !result[removing] -> result[removing] = 1 }
  /* It is taken out, and the next is hinted. [stores/redis/lua/queue_remove.lua] */
  :: d_step { removing != NO_CALL && result[removing] ->
      if
      :: state[removing] == LEAVING -> take_out(removing); hint_next(); publish_next()
      :: else
      fi;
      removing = NO_CALL;
      verify() }
  /* The operator's process is killed. [environment] */
  :: d_step { removing != NO_CALL && FAULT; removing = NO_CALL }
  od
}
#endif

#ifdef PAUSE
proctype pauser() {
end:
  do
  /* The key is paused. [stores/redis/lua/pause.lua] */
  :: d_step { !was_paused -> was_paused = 1; paused = 1 }
  /* It is resumed, or the pause ends by itself. [stores/redis/lua/resume.lua] */
  :: d_step { paused -> paused = 0 }
  od
}
#endif

proctype environment() {
end:
  do
#ifdef LOSS
  /* The store has lost the writes that made an entry. [environment] */
  :: d_step { !lost && IN(0) -> lost = 1; state[0] = ABSENT; number[0] = 0; stored[0] = 0; verify() }
  :: d_step { !lost && IN(1) -> lost = 1; state[1] = ABSENT; number[1] = 0; stored[1] = 0; verify() }
  /* The store has lost a marker. [environment] */
  :: d_step { !lost && marker[0] -> lost = 1; marker[0] = 0 }
  :: d_step { !lost && marker[1] -> lost = 1; marker[1] = 0 }
  /* The store has lost everything, while no worker held the key. [environment] */
  :: d_step { !lost && (key == FREE || key == FOREIGN || key == ORPHAN) ->
      lost = 1;
      state[0] = ABSENT;
      state[1] = ABSENT;
      number[0] = 0;
      number[1] = 0;
      stored[0] = 0;
      stored[1] = 0;
      marker[0] = 0;
      marker[1] = 0;
      key = FREE;
      last = 0;
      due = 0;
      verify() }
#endif
#ifdef RATE
  /* Time passes: the rate lets the next call begin soon, or now. [environment] */
  :: d_step { spent -> if :: left > 0 -> left-- :: else fi; spent = (left > 0) }
#endif
  /* The lease of a dead worker ends, or its parent releases it. [environment] */
  :: d_step { key == ORPHAN -> key = FREE }
  /* Another client takes the key. [environment] */
  :: d_step { key == FREE && !foreigner -> foreigner = 1; key = FOREIGN }
  /* It releases the key, and does not notify the queue. [environment] */
  :: d_step { key == FOREIGN -> key = FREE }
  /* The broker loses a message. [environment] */
  :: d_step { copies[0] > 0 && FAULT; copies[0]-- }
  :: d_step { copies[1] > 0 && FAULT; copies[1]-- }
  :: d_step { copies[2] > 0 && FAULT; copies[2]-- }
  od
}

init {
  atomic {
    noted[0] = NO_CALL;
    noted[1] = NO_CALL;
    w[0].reply = NO_CALL;
    w[1].reply = NO_CALL;
    run publisher(0);
    run publisher(1);
    run worker(0);
    run worker(1);
    run look();
#ifdef OPERATOR
    run operator();
#endif
#ifdef PAUSE
    run pauser();
#endif
    run environment()
  }
}

#ifdef LIVENESS
/* Every call in the queue leaves it. */
ltl every_call_ends { [] (IN(0) -> <> !IN(0)) && [] (IN(1) -> <> !IN(1)) }
#endif
#ifdef HINTS
/* 5. The head of a queue whose key is free does not wait unhinted. */
#define UNHINTED (key == FREE && (HEAD(0) && state[0] == WAITING || HEAD(1) && state[1] == WAITING))
ltl the_head_is_hinted { [] (UNHINTED -> <> !UNHINTED) }
#endif
#ifdef UNNOTICED
/* 10. A call that a foreign holder left behind is hinted, and ends. */
#define LEFT(i) (foreigner && key == FREE && state[i] == WAITING && !EMPTY)
ltl a_foreign_release_is_noticed { [] (LEFT(0) -> <> !IN(0)) && [] (LEFT(1) -> <> !IN(1)) }
#endif

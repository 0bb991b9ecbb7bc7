/* The lease on one key: N clients, one store, a resource, and every fault that can come between.
 *
 * Each action below is one atomic step, and any number of other steps and of ticks may come before
 * the next. So every pause (SIGSTOP, a C call that holds the GIL, a suspended machine) and every
 * delay of a message is among the behaviours. The comment before an action names the functions that
 * implement it, in brackets; [environment] marks what happens to the protocol.
 *
 * Time is counted down, in ticks, never up: the store counts the ticks that the key has left, and each
 * client those for which it may still trust its lease. So a run can last arbitrarily long, and yet the
 * states are finite. With FENCES the server's own clock is modelled too; it stops at HORIZON.
 *
 * A request whose reply is not awaited any more may be lost, or be carried out later, when its client
 * has long continued: a stray. Each client has at most one; a newer one replaces the older, which is
 * then lost. The second try of a release is such a stray too. NO_STRAYS leaves them out. With PARENT_HEARTBEAT
 * the worker parents renew too (the parent heartbeat).
 *
 * With ASYNC releases may be asynchronous, as those of short bodies are with Redis: the body ends
 * without waiting for the reply. The model leaves open which connection the next command uses, so that
 * it may supersede the release. Each client has at most one unconfirmed release. Resending it and
 * reading the reply are one step, because no behaviour depends on what happens in between. SURE leaves
 * out all faults that only the ttl can repair: an asynchronous release may be lost, but a request that
 * waits for its reply gets it, and a parent outlives its child. ONE_SIDED: only the first client
 * releases asynchronously, and has strays.
 *
 * Must-fail variants, each a protection taken out: NO_OWNER_CHECK, NO_DEADLINE, NO_MARGIN,
 * TRUST_FROM_REPLY, RENEWAL_RECREATES, NO_EXPIRY, NO_FENCE_CHECK, FENCE_WITHOUT_CLOCK; of asynchronous
 * releases: AGAIN_WITHOUT_OWNER, TOKEN_AGAIN, HEARTBEAT_GOES_ON, LOST_FOR_GOOD, DRAIN_BEFORE_SEND,
 * NOTE_FORGOTTEN. And a property that is not promised: EXCLUSION_OVER_LOSS.
 *
 * Names in the model: beat is the heartbeat's renewal, parent_beat the parent heartbeat's, owed the
 * unconfirmed asynchronous release, and let_go the heartbeat's entry for it.
 */

#ifndef N
#define N 2 /* clients */
#endif
#ifndef TTL
#define TTL 3 /* ticks that a grant or a renewal lasts in the store */
#endif
#ifndef HORIZON
#define HORIZON 6 /* with FENCES: ticks until the clock stops */
#endif
#ifndef GRANTS
#define GRANTS 4 /* with FENCES: how many grants there may be */
#endif
#define SPAN 8 /* fences in a tick: a server can't grant as often as its clock has microseconds */

/* By how many ticks a ttl may end earlier on the store's clock than on the client's. */
#define DRIFT 1
/* [core/clock_drift.py drift] [core/lease.py trust_of] */
#ifdef NO_MARGIN
#define TRUST TTL
#else
#define TRUST (TTL - DRIFT)
#endif

/* Where the body's thread is. */
#define IDLE 0
#define ASKING 1 /* acquire was sent */
#define BODY 2
#define CHECKED 3 /* in the body, between check() and the write */
#define SENDING 4 /* renewal has ended, the release is not sent yet */
#define QUIET 5 /* alive, and no more deliveries come */

/* The state of a request. */
#define NOTHING 0
#define SENT 1
#define YES 2 /* granted or renewed */
#define NO 3 /* refused, or not yours */
#define BROKEN 4 /* the connection was reset */
#define FAILED 5 /* an asynchronous release that was resent without success: left to the parent and the ttl */

/* The operation of a stray request. */
#define ACQUIRE 1
#define RENEW 2
#define RELEASE 3

typedef Client {
  byte at;
  byte token;
  bit again; /* the second try of the acquire is under way */
  byte acquire; /* its request */
  byte acquire_trust; /* for how long a grant will be trusted, counted from before it was sent */
  bit held; /* granted, neither released nor declared lost */
  byte trust; /* until valid_until */
  byte beat; /* the heartbeat's renewal */
  byte beat_trust;
#ifdef PARENT_HEARTBEAT
  byte parent_beat; /* the parent heartbeat's renewal */
  byte parent_beat_trust;
#endif
  byte stray;
  byte stray_token;
#ifdef ASYNC
  byte owed; /* the asynchronous release; NO: an error reply, or its connection is closed */
  byte owed_token; /* of the latest release, also when it is confirmed */
  bit let_go; /* the heartbeat will drain it */
  bit superseded; /* the acquire was refused because of the lease that this release ends */
#endif
  bit latest; /* the latest grant was to this token; a ghost */
#ifdef FENCES
  byte fence; /* of the lease */
  byte grant_number; /* the number of its grant; a ghost */
#endif
};

Client c[N];

/* The store. */
byte key; /* the token of its lease; 0: free */
byte left; /* ticks */
#ifdef OVERSTAYS
byte overstayed; /* ticks since its living holder's body ended with an asynchronous release; a ghost */
#endif
#ifdef LOSSES
byte losses = LOSSES;
byte shaken; /* ticks in which exclusion may not hold after a loss of data; a ghost */
#define EXCUSED (shaken > 0)
#else
#define EXCUSED false
#endif
#ifdef FENCES
byte now;
byte counter;
byte grants; /* grants so far; a ghost */
byte passed; /* the highest fence that the resource has seen */
byte newest; /* the latest grant of which it has accepted a write; a ghost */
bit down;
#define UP (!down)
#define ROOM (grants < GRANTS && counter < now * SPAN + SPAN - 1)
#else
#define UP true
#define ROOM true
#endif

/* All but one of a client's tokens may be in use somewhere, so there is always a new one. */
#ifdef ASYNC
#define TOKENS 4
#else
#define TOKENS 3
#endif
#define FIRST_TOKEN(i) (1 + TOKENS * (i))
#ifdef TOKEN_AGAIN
#define STANDS(i, some) (key == (some))
#elif defined(ASYNC)
#define STANDS(i, some) (key == (some) || c[i].stray_token == (some) || c[i].owed_token == (some))
#else
#define STANDS(i, some) (key == (some) || c[i].stray_token == (some))
#endif

/* Whether a grant that comes after its deadline counts. */
#if defined(NO_DEADLINE) || defined(TRUST_FROM_REPLY)
#define ANY_GRANT_COUNTS true
#else
#define ANY_GRANT_COUNTS false
#endif

/* Whether client i would pass check() now. [core/lease.py Lease.lost] */
#ifdef NO_DEADLINE
#define BELIEVES(i) (c[i].held)
#else
#define BELIEVES(i) (c[i].held && c[i].trust > 0)
#endif

/* Exclusion, and more: a client that would pass check() had the latest grant. So no other client ran
 * in between, and a lease that was lost is never valid again. A store that lost data is excused for as
 * long as leases from before the loss may be trusted. */
#define SOUND(i) (!BELIEVES(i) || c[i].latest || EXCUSED)
#if N == 3
#define EACH(action) action(0); action(1); action(2)
#define ALL(claim) (claim(0) && claim(1) && claim(2))
#else
#define EACH(action) action(0); action(1)
#define ALL(claim) (claim(0) && claim(1))
#endif
/* A stray renewal or release of a lease that is gone never has an effect, so it is dropped. */
#if defined(NO_OWNER_CHECK) || defined(RENEWAL_RECREATES)
#define POINTLESS(i) false
#else
#define POINTLESS(i) (c[i].stray != ACQUIRE && c[i].stray_token != key)
#endif
#ifdef ASYNC
/* The state of a release matters only as long as its token may be found. */
#define MAY_BE_FOUND(i) (c[i].owed_token != 0 && (key == c[i].owed_token || c[i].stray_token == c[i].owed_token))
#define WITHOUT_USE(i) (MAY_BE_FOUND(i) -> c[i].owed : (c[i].owed == FAILED -> NOTHING : (c[i].owed == SENT -> YES : c[i].owed)))
#define REMEMBERED(i) (c[i].owed != NOTHING || c[i].superseded || MAY_BE_FOUND(i))
#define TIDY_PENDING(i) ; c[i].owed = WITHOUT_USE(i); c[i].owed_token = (REMEMBERED(i) -> c[i].owed_token : 0)
/* No release, however late, frees or hands over a key whose lease is trusted. */
#define UNTOUCHED(i) (!BELIEVES(i) || key == c[i].token || EXCUSED)
#else
#define TIDY_PENDING(i)
#define UNTOUCHED(i) true
#endif
#define TIDY(i) c[i].stray = (POINTLESS(i) -> NOTHING : c[i].stray); c[i].stray_token = (c[i].stray == NOTHING -> 0 : c[i].stray_token) TIDY_PENDING(i)

inline verify() {
  EACH(TIDY);
  assert(ALL(SOUND));
  assert(ALL(UNTOUCHED))
}

#define MARK_LATEST(i) c[i].latest = (c[i].token == key)
/* [stores/redis/lua/acquire.lua] [stores/transitions.py _acquire] */
inline grant(whom) {
  key = whom;
  left = TTL;
#ifdef OVERSTAYS
  overstayed = 0;
#endif
  EACH(MARK_LATEST);
#ifdef FENCES
  grants++;
#ifdef FENCE_WITHOUT_CLOCK
  counter++
#else
  counter = (now * SPAN > counter + 1 -> now * SPAN : counter + 1)
#endif
#endif
}

/* [stores/redis/lua/renew.lua] [stores/transitions.py _renew] */
#ifdef RENEWAL_RECREATES
#define RENEWABLE(whom) (key == (whom) || key == 0)
#else
#define RENEWABLE(whom) (key == (whom))
#endif

inline renew(whom) {
  key = whom;
  left = TTL
}

/* [stores/redis/lua/release.lua] [stores/transitions.py _release] */
#ifdef NO_OWNER_CHECK
#define RELEASABLE(whom) (key != 0)
#else
#define RELEASABLE(whom) (key == (whom))
#endif

inline free_key() {
  key = 0;
  left = 0
}

#ifdef ONE_SIDED
#define MAY_RELEASE_ASYNC(i) ((i) == 0)
#define MAY_STRAY(i) ((i) == 0)
#else
#define MAY_RELEASE_ASYNC(i) true
#define MAY_STRAY(i) true
#endif
inline stray_of(kind, whose) {
#ifndef NO_STRAYS
  c[me].stray = (MAY_STRAY(me) -> kind : NOTHING);
  c[me].stray_token = (MAY_STRAY(me) -> whose : 0);
#endif
  skip
}

inline stray_on(kind) {
  stray_of(kind, c[me].token)
}

/* Read the clock, then send. [core/locker.py Locker.acquire] */
inline ask() {
  c[me].acquire = SENT;
  c[me].acquire_trust = TRUST
}

inline stop_asking() {
  c[me].acquire = NOTHING;
  c[me].acquire_trust = 0;
#ifdef ASYNC
  c[me].superseded = 0;
#endif
  c[me].again = 0
}

inline stop_beating() {
  c[me].beat = NOTHING;
  c[me].beat_trust = 0
}

/* The parent observes it too: its renewal under way does not count any more. [core/lease.py Lease.end] */
inline stop_trusting() {
  c[me].held = 0;
  c[me].trust = 0;
  c[me].beat_trust = 0;
#ifdef PARENT_HEARTBEAT
  c[me].stray = (c[me].parent_beat == SENT -> RENEW : c[me].stray);
  c[me].stray_token = (c[me].parent_beat == SENT -> c[me].token : c[me].stray_token);
  c[me].parent_beat = NOTHING;
  c[me].parent_beat_trust = 0;
#endif
}

/* The delivery has ended for this client. */
inline end_with(fate) {
  stop_trusting();
  give_back(fate);
#ifdef ASYNC
  c[me].let_go = (c[me].at == SENDING -> 0 : c[me].let_go);
#endif
  leave();
  verify()
}

inline leave() {
  stop_asking();
  stop_beating();
  c[me].at = IDLE;
  c[me].token = 0;
  c[me].latest = 0;
#ifdef FENCES
  c[me].fence = 0;
  c[me].grant_number = 0;
#endif
  skip
}

/* The fate of the last request of a token: its release by token is carried out at once, later, or
 * never; or a request that was under way before arrives later. */
#define AT_ONCE 0
#define LATER 1
#define NEVER 2
#define ANOTHER 3
inline give_back(fate) {
  if
  :: fate == AT_ONCE && UP && RELEASABLE(c[me].token) -> free_key()
  :: fate == LATER -> stray_on(RELEASE)
  :: fate == ANOTHER && c[me].acquire == SENT -> stray_on(ACQUIRE)
  :: fate == ANOTHER && c[me].beat == SENT -> stray_on(RENEW)
  :: else
  fi
}
#define UNDER_WAY (c[me].acquire == SENT || c[me].beat == SENT)
#ifdef SURE
#define HAPPENS(mishap) false
#else
#define HAPPENS(mishap) (mishap)
#endif

#ifdef ASYNC
/* The asynchronous release has ended. */
inline settle_release(how) {
  c[me].owed = how;
  c[me].let_go = 0;
  verify()
}

/* Resend it, and wait for the reply. */
#ifdef AGAIN_WITHOUT_OWNER
#define RELEASABLE_AGAIN (key != 0)
#else
#define RELEASABLE_AGAIN RELEASABLE(c[me].owed_token)
#endif
inline resend() {
  if
  :: UP && RELEASABLE_AGAIN -> free_key()
  :: else
  fi
}

#define PENDING (c[me].owed == SENT || c[me].owed == YES || c[me].owed == NO)
/* Whether the next command resends it. */
#ifdef LOST_FOR_GOOD
#define TO_BE_RESENT false
#else
#define TO_BE_RESENT (c[me].owed == NO && (c[me].acquire == YES || c[me].acquire == NO))
#endif
#endif

proctype client(byte me) {
end:
  do
  /* A delivery arrives and gets a unique token. [worker/request.py SingletonRequestMixin.__init__] [message/header.py mint_nonce] [core/locker.py Locker.acquire] */
  :: d_step { c[me].at == IDLE ->
      c[me].token = FIRST_TOKEN(me);
      do
      :: STANDS(me, c[me].token) -> c[me].token++
      :: else -> break
      od;
      c[me].at = ASKING;
      ask() }

  /* The store carries out an acquire. [stores/redis/lua/acquire.lua] [stores/transitions.py _acquire] */
  :: d_step { c[me].acquire == SENT && UP && ROOM ->
      if
      :: key == 0 || key == c[me].token ->
        grant(c[me].token);
#ifdef FENCES
        c[me].fence = counter;
        c[me].grant_number = grants;
#endif
        c[me].acquire = YES
      :: else ->
        c[me].acquire = NO;
#ifdef ASYNC
        c[me].superseded = (key == c[me].owed_token);
        c[me].acquire_trust = (c[me].superseded -> c[me].acquire_trust : 0)
#else
        c[me].acquire_trust = 0
#endif
      fi;
      verify() }

  /* No reply in time: a second try with the same token. [core/locker.py Locker.acquire] [core/heartbeat.py timeout_for] */
  :: d_step { c[me].at == ASKING && !c[me].again ->
      c[me].again = 1;
      ask() }

  /* The same, and the first request may still arrive. [core/locker.py Locker.acquire] */
  :: d_step { c[me].acquire == SENT && !c[me].again ->
      stray_on(ACQUIRE);
      c[me].again = 1;
      ask() }

  /* No reply again, or an interruption between sending and reading: release by token. [core/locker.py Locker.acquire] [core/locker.py Locker.undo] */
  :: d_step { c[me].at == ASKING -> end_with(AT_ONCE) }
  :: d_step { HAPPENS(c[me].at == ASKING) -> end_with(LATER) }
  :: d_step { HAPPENS(c[me].at == ASKING) -> end_with(NEVER) }

  /* The grant is read: a lease, whose validity counts from before the request was sent. [core/locker.py Locker.acquire] [core/heartbeat.py Heartbeat.add] */
  :: d_step { c[me].acquire == YES && (c[me].acquire_trust > 0 || ANY_GRANT_COUNTS) ->
#ifdef TRUST_FROM_REPLY
      c[me].trust = TRUST;
#else
      c[me].trust = c[me].acquire_trust;
#endif
      stop_asking();
      c[me].held = 1;
      c[me].at = BODY;
      verify() }

  /* The refusal is read, and ends this delivery here. [core/locker.py Locker.acquire] */
#ifdef ASYNC
  :: d_step { c[me].acquire == NO && !c[me].superseded -> end_with(NEVER) }
#else
  :: d_step { c[me].acquire == NO -> end_with(NEVER) }
#endif

#ifdef FENCES
  /* The body checks whether it may write. [core/lease.py Lease.check] */
  :: d_step { c[me].at == BODY && BELIEVES(me) -> c[me].at = CHECKED }

  /* It writes, however long ago it checked; the resource compares the fence. [core/lease.py Lease.fence] */
  :: d_step { c[me].at == CHECKED ->
      c[me].at = BODY;
      if
#ifndef NO_FENCE_CHECK
      :: c[me].fence < passed
#endif
      :: else ->
        passed = c[me].fence;
        assert(c[me].grant_number >= newest);
        newest = c[me].grant_number
      fi }
#endif

  /* The heartbeat sends a renewal, unless the deadline has passed. [core/heartbeat.py Heartbeat.sweep] [core/heartbeat.py Heartbeat._renew] */
  :: d_step { c[me].beat == NOTHING && BELIEVES(me) ->
      c[me].beat = SENT;
      c[me].beat_trust = TRUST }

  /* The store carries out a renewal. [stores/redis/lua/renew.lua] [stores/transitions.py _renew] */
  :: d_step { c[me].beat == SENT && UP ->
      if
      :: RENEWABLE(c[me].token) ->
        renew(c[me].token);
        c[me].beat = YES
      :: else ->
        c[me].beat = NO;
        c[me].beat_trust = 0
      fi }

  /* "Renewed" is read; after the deadline it does not count. [core/heartbeat.py Heartbeat._renew] [core/heartbeat.py Heartbeat._apply] */
  :: d_step { c[me].beat == YES ->
      if
      :: BELIEVES(me) -> c[me].trust = (c[me].trust > c[me].beat_trust -> c[me].trust : c[me].beat_trust)
      :: else
      fi;
      stop_beating();
      verify() }

  /* "Not yours" is read: lost at once. [core/heartbeat.py Heartbeat._take] [core/heartbeat.py Heartbeat._lose] */
  :: d_step { c[me].beat == NO ->
      stop_trusting();
      stop_beating() }

  /* No reply to the renewal: it will be repeated. [core/heartbeat.py _postpone] */
  :: d_step { c[me].beat != NOTHING -> stop_beating() }

  /* The same, and the first request may still arrive. [core/heartbeat.py _postpone] */
  :: d_step { c[me].beat == SENT ->
      stray_on(RENEW);
      stop_beating() }

#ifdef PARENT_HEARTBEAT
  /* The worker parent renews its living child's lease, with the child's token, unless the deadline has passed. [worker/parent_heartbeat.py ParentHeartbeat.sweep] [worker/parent_heartbeat.py ParentHeartbeat._renew] [worker/shared_memory.py SharedMemory.of_living] */
  :: d_step { c[me].parent_beat == NOTHING && BELIEVES(me) ->
      c[me].parent_beat = SENT;
      c[me].parent_beat_trust = TRUST }

  /* The store carries out that renewal; the parent ignores "not yours". [stores/redis/lua/renew.lua] [stores/transitions.py _renew] */
  :: d_step { c[me].parent_beat == SENT && UP ->
      if
      :: RENEWABLE(c[me].token) ->
        renew(c[me].token);
        c[me].parent_beat = YES
      :: else ->
        c[me].parent_beat = NOTHING;
        c[me].parent_beat_trust = 0
      fi;
      verify() }

  /* The parent notes the new deadline, however late; a lease that the child has declared lost stays lost. [worker/parent_heartbeat.py ParentHeartbeat._record] [worker/shared_memory.py SharedMemory.advance] [core/lease.py Lease.deadline] */
  :: d_step { c[me].parent_beat == YES ->
      c[me].trust = (c[me].trust > c[me].parent_beat_trust -> c[me].trust : c[me].parent_beat_trust);
      c[me].parent_beat = NOTHING;
      c[me].parent_beat_trust = 0;
      verify() }

  /* No reply to the parent. [worker/parent_heartbeat.py ParentHeartbeat._record] */
  :: d_step { c[me].parent_beat == SENT ->
      stray_on(RENEW);
      c[me].parent_beat = NOTHING;
      c[me].parent_beat_trust = 0;
      verify() }
#endif

#ifndef NO_DEADLINE
  /* The deadline has passed: lost for good. [core/heartbeat.py Heartbeat._declare_overdue] [core/heartbeat.py Heartbeat._lose] */
  :: d_step { c[me].held && c[me].trust == 0 -> stop_trusting() }
#endif

  /* The body ends, normally or interrupted, and releases; a reply to the heartbeat is ignored from now on. [core/locker.py Locker.release] [core/locker.py Locker.release] [core/heartbeat.py Heartbeat.stop] */
  :: d_step { c[me].at == BODY -> end_with(AT_ONCE) }
  :: d_step { HAPPENS(c[me].at == BODY) -> end_with(LATER) }

#ifdef ASYNC
  /* The body ends well within its deadline, and the reply is not needed: first renewal ends, and the heartbeat will drain. [core/locker.py Locker.give_back] [core/heartbeat.py Heartbeat.let_go] */
  :: d_step { c[me].at == BODY && BELIEVES(me) && MAY_RELEASE_ASYNC(me) && !PENDING ->
      stop_trusting();
      stop_beating();
      c[me].let_go = 1;
      c[me].at = SENDING;
      verify() }

  /* The same, and a renewal under way arrives later. [core/locker.py Locker.give_back] [core/heartbeat.py Heartbeat.let_go] */
  :: d_step { c[me].at == BODY && BELIEVES(me) && MAY_RELEASE_ASYNC(me) && !PENDING && c[me].beat == SENT ->
      stop_trusting();
      stray_on(RENEW);
      stop_beating();
      c[me].let_go = 1;
      c[me].at = SENDING;
      verify() }

  /* The release is sent; the heartbeat will drain it, even if it has just drained. [stores/redis/async_release.py PendingReleases.begin] [stores/redis/connection.py Connections.send_async] [core/heartbeat.py Heartbeat.sent] */
  :: d_step { c[me].at == SENDING && !PENDING ->
      c[me].owed = SENT;
      c[me].owed_token = c[me].token;
#ifndef DRAIN_BEFORE_SEND
      c[me].let_go = 1;
#endif
      leave();
      verify() }

  /* It cannot be sent without waiting: there is no idle connection. [stores/redis/async_release.py PendingReleases.withdraw] [core/locker.py Locker.release] */
  :: d_step { c[me].at == SENDING -> end_with(AT_ONCE) }
  :: d_step { HAPPENS(c[me].at == SENDING) -> end_with(LATER) }

  /* The store carries out an asynchronous release. [stores/redis/lua/release.lua] [stores/transitions.py _release] */
  :: d_step { c[me].owed == SENT && UP ->
      if
      :: RELEASABLE(c[me].owed_token) -> free_key()
      :: else
      fi;
      c[me].owed = YES;
      verify() }

  /* The store refuses it: it does not have the script any more, or is a replica. [environment] */
  :: d_step { c[me].owed == SENT -> c[me].owed = NO }

  /* Its connection is closed, for whatever reason, and the reply is lost; the release may still arrive. [stores/redis/connection.py Connection.close] [stores/redis/async_release.py PendingRelease.lose] */
  :: d_step { c[me].owed == YES -> c[me].owed = NO }
  :: d_step { c[me].owed == SENT ->
      stray_of(RELEASE, c[me].owed_token);
      c[me].owed = NO;
      verify() }

  /* Its reply is read, before the reply to the connection's next command. [stores/redis/connection.py Connection.replies] [stores/redis/async_release.py PendingRelease.acknowledge] [stores/redis/async_release.py PendingReleases.end] [core/locker.py Locker._on_reply] [core/heartbeat.py Heartbeat.confirmed] */
  :: d_step { c[me].owed == YES -> settle_release(NOTHING) }

  /* It was lost: it is resent after the store's next reply. [stores/redis/runner.py ScriptRunner.run] [stores/redis/async_release.py PendingReleases.resend_lost] */
  :: d_step { TO_BE_RESENT ->
      resend();
      settle_release(NOTHING) }

  /* The resent release gets no reply, and may still arrive. [stores/redis/async_release.py PendingReleases.resend_lost] [stores/redis/async_release.py PendingReleases.end] */
  :: d_step { HAPPENS(TO_BE_RESENT) -> settle_release(FAILED) }
  :: d_step { HAPPENS(TO_BE_RESENT) ->
      stray_of(RELEASE, c[me].owed_token);
      settle_release(FAILED) }

  /* The acquire found a lease that this process has released: it has overtaken the release. Both are sent again, the release first. [stores/redis/leases.py RedisLeases.acquire] [stores/redis/async_release.py PendingReleases.superseding] [stores/redis/async_release.py PendingReleases.resend] */
  :: d_step { c[me].acquire == NO && c[me].superseded ->
      resend();
      c[me].superseded = 0;
      c[me].acquire = SENT;
      verify() }

  /* SIGKILL of a child whose release is not confirmed: its parent releases by the noted token. [worker/shared_memory.py SharedMemory.of_dead] [worker/dead_child.py release_leases] */
  :: d_step { c[me].at == IDLE && c[me].owed != NOTHING && UP ->
#ifndef NOTE_FORGOTTEN
      if
      :: RELEASABLE(c[me].owed_token) -> free_key()
      :: else
      fi;
#endif
      assert(c[me].owed_token != key);
      c[me].owed_token = 0;
      settle_release(NOTHING) }

  /* The same, later or never; or the child's own request arrives later. [worker/dead_child.py release_leases] */
  :: d_step { HAPPENS(c[me].at == IDLE && c[me].owed != NOTHING) ->
      stray_of(RELEASE, c[me].owed_token);
      c[me].owed_token = 0;
      settle_release(NOTHING) }
  :: d_step { HAPPENS(c[me].at == IDLE && c[me].owed != NOTHING) ->
      c[me].owed_token = 0;
      settle_release(NOTHING) }

#ifdef LIVENESS
  /* No more deliveries come. [environment] */
  :: d_step { c[me].at == IDLE -> c[me].at = QUIET }
#endif
#endif

  /* A request whose reply is not awaited any more arrives. [environment] */
  :: d_step { c[me].stray != NOTHING && UP && (c[me].stray != ACQUIRE || ROOM) ->
      if
      :: c[me].stray == ACQUIRE && (key == 0 || key == c[me].stray_token) -> grant(c[me].stray_token)
      :: c[me].stray == RENEW && RENEWABLE(c[me].stray_token) -> renew(c[me].stray_token)
      :: c[me].stray == RELEASE && RELEASABLE(c[me].stray_token) -> free_key()
      :: else
      fi;
      c[me].stray = NOTHING;
      c[me].stray_token = 0;
      verify() }

  /* It is lost. [environment] */
  :: d_step { c[me].stray != NOTHING ->
      c[me].stray = NOTHING;
      c[me].stray_token = 0 }

  /* SIGKILL of a child: its parent releases by the noted token, now or later. [worker/shared_memory.py SharedMemory.note] [worker/shared_memory.py SharedMemory.of_dead] [worker/dead_child.py release_leases] */
  :: d_step { c[me].at == CHECKED -> end_with(AT_ONCE) }
  :: d_step { c[me].at == CHECKED -> end_with(LATER) }

  /* SIGKILL of a child and its parent; a request under way may arrive. For the store, a child that dies in its body or during an acquire is one that ends there. [environment] */
  :: d_step { HAPPENS(c[me].at != IDLE && c[me].at != QUIET) -> end_with(NEVER) }
  :: d_step { HAPPENS(UNDER_WAY) -> end_with(ANOTHER) }
  od
}

#ifdef ASYNC
/* The heartbeat: part of the client, but a thread of its own, which runs whatever the bodies do. */
proctype heartbeat(byte me) {
end:
  do
  /* No release was sent yet, so there is nothing to drain. [core/heartbeat.py Heartbeat._collect] */
  :: d_step { c[me].let_go && !PENDING -> c[me].let_go = 0 }

  /* The reply has arrived, and no other command has read it. [core/heartbeat.py Heartbeat._collect] [stores/redis/runner.py ScriptRunner.drain] [stores/redis/connection.py Connections.drain] */
  :: d_step { c[me].let_go && c[me].owed == YES -> settle_release(NOTHING) }

#ifndef LOST_FOR_GOOD
  /* No reply that confirms it has arrived: the heartbeat resends it. [core/heartbeat.py Heartbeat._collect] [stores/redis/runner.py ScriptRunner.drain] [stores/redis/async_release.py PendingReleases.resend_lost] */
  :: d_step { c[me].let_go && PENDING ->
      resend();
      settle_release(NOTHING) }

  /* The same, and the first request may still arrive. [stores/redis/runner.py ScriptRunner.drain] [stores/redis/async_release.py PendingReleases.resend_lost] */
  :: d_step { c[me].let_go && c[me].owed == SENT ->
      resend();
      stray_of(RELEASE, c[me].owed_token);
      settle_release(NOTHING) }

  /* The resent release gets no reply, and may still arrive. [stores/redis/async_release.py PendingReleases.resend_lost] [stores/redis/async_release.py PendingReleases.end] [core/locker.py Locker._on_reply] */
  :: d_step { HAPPENS(c[me].let_go && PENDING) -> settle_release(FAILED) }
  :: d_step { HAPPENS(c[me].let_go && PENDING) ->
      stray_of(RELEASE, c[me].owed_token);
      settle_release(FAILED) }
#endif

#ifdef HEARTBEAT_GOES_ON
  /* No action of the protocol: a heartbeat that renews a lease whose release was sent. */
  :: d_step { c[me].owed != NOTHING && key == c[me].owed_token -> renew(c[me].owed_token) }
#endif
  od
}
#endif

#ifdef OVERSTAYS
#define LET_GO(i) (key != 0 && (c[i].owed != NOTHING && key == c[i].owed_token || c[i].at == SENDING && key == c[i].token))
#endif
#define COUNT_DOWN(timer) timer = (timer > 0 -> timer - 1 : 0)
#ifdef PARENT_HEARTBEAT
#define PASS_PARENT_BEAT(i) COUNT_DOWN(c[i].parent_beat_trust);
#else
#define PASS_PARENT_BEAT(i)
#endif
#define PASS(i) PASS_PARENT_BEAT(i) COUNT_DOWN(c[i].acquire_trust); COUNT_DOWN(c[i].trust); COUNT_DOWN(c[i].beat_trust)

proctype clock() {
end:
  do
  /* Time passes, and a key without time left is deleted. [core/clock.py SystemClock] */
  :: d_step {
#ifdef FENCES
      now < HORIZON ->
      now++;
      down = 0;
#endif
#ifndef NO_EXPIRY
      COUNT_DOWN(left);
#endif
      key = (left > 0 -> key : 0);
#ifdef LOSSES
      COUNT_DOWN(shaken);
#endif
      EACH(PASS);
#ifdef OVERSTAYS
      overstayed = (LET_GO(0) || LET_GO(1) -> overstayed + 1 : 0);
      assert(overstayed < TTL);
#endif
      verify() }

  /* The store's clock is ahead of the holder's by the drift. [environment] */
#ifndef NO_EXPIRY
  :: d_step { key != 0 && left <= DRIFT ->
      free_key();
      verify() }
#endif
  od
}

#ifdef LOSSES
#define CUT(request) request = (request == SENT -> BROKEN : request)
#ifdef ASYNC
#define CUT_PENDING(i) c[i].owed = (c[i].owed == SENT || c[i].owed == YES -> NO : c[i].owed);
#else
#define CUT_PENDING(i)
#endif
#define RESET(i) CUT(c[i].acquire); CUT(c[i].beat); CUT_PENDING(i) c[i].stray = NOTHING; c[i].stray_token = 0

proctype catastrophe() {
end:
  do
  /* The store is restarted and has lost all data; all connections are closed. [environment] */
  :: d_step { losses > 0 ->
      losses--;
      free_key();
#ifndef EXCLUSION_OVER_LOSS
      shaken = TTL;
#endif
#ifdef FENCES
      counter = 0;
      down = 1; /* until the next tick: a restart takes longer than the fences of one tick */
#endif
      EACH(RESET) }
  od
}
#endif

init {
  byte n;
  atomic {
    do
    :: n < N ->
      run client(n);
#ifdef ASYNC
      run heartbeat(n);
#endif
      n++
    :: else -> break
    od;
    n = 0;
    run clock();
#ifdef LOSSES
    run catastrophe()
#endif
  }
}

#ifdef LIVENESS
/* Whether the key has a token of no living client. */
#define STUCK (key != 0 && key != c[0].token && key != c[1].token)
/* No lock stays stuck for ever. */
ltl no_lock_is_stuck { [] (STUCK -> <> !STUCK) }
#endif

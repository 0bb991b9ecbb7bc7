/* The wait queue of one key: handoff tokens, a key that is reserved for the woken client, and polling.
 *
 * The first client does not wait: it is skipped when another client has the key. Its releases are
 * asynchronous, as those of a short task are (see lease.pml). The others wait, and wake each other when
 * they have had the key. A waiting client polls, woken or not, however late. Time is counted down in
 * ticks, as in lease.pml: any number of steps and ticks may come between two steps. A key is reserved
 * for one tick. A waiting client counts as waiting for two, which is less than in the code: the time may
 * end before the client's next poll, and it may outlast a client that is dead.
 *
 * Any step may be a client's last: it is killed, and another one begins in its place. A handoff token
 * is lost with the connection from which it is read. With FORGETS the store loses all data once, and all
 * connections are closed. Requests that arrive after their client has continued are in lease.pml.
 *
 * A token, and a handoff token, is new each time. So of a token in the key it only matters to which
 * client it belongs, and of a handoff token whether the key is reserved for it.
 *
 * The comment before an action names the functions that implement it, in brackets; [environment]
 * marks what happens to the protocol.
 *
 * Must-fail variants, each a protection taken out: HANDOFF_TAKES_ALL, HANDOFF_WITHOUT_NAME,
 * RESERVED_FOR_ANY, AGAIN_HANDS_OVER, RESERVED_FOR_EVER, NO_POLLING.
 */

#ifndef TTL
#define TTL 2 /* ticks that a grant lasts in the store */
#endif
#define DRIFT 1
#define TRUST (TTL - DRIFT)
/* Ticks that a key is reserved for the woken client, and that the handoff token lasts. [stores/redis/lua/wait_queue.lua] */
#define RESERVED 1
/* Ticks that a client counts as waiting after a refused acquire. [core/waiter.py Waiter.acquire] */
#define COUNTED 2

/* Where a client is. */
#define IDLE 0
#define ASKING 1
#define BODY 2
#define WAITING 3

/* The state of a request. */
#define NOTHING 0
#define SENT 1
#define YES 2
#define NO 3

/* The state of a handoff token. */
#define VALID 1 /* the key is reserved for it */
#define OVER 2

/* The token of the key, or the one before it was reserved: 1 to 3, of a client; or */
#define FREE 0
#define RELEASED 4 /* the token whose asynchronous release the first client has sent */
#define OF_NO_CLIENT 5

typedef Client {
  byte at;
  bit again; /* the second try of the acquire is under way */
  byte request;
  byte request_trust; /* as in lease.pml */
  byte trust;
  byte handoff; /* its handoff token, sent with its next acquire */
  bit blocks; /* in BLPOP, on the list of handoff tokens */
  byte counted; /* ticks for which it counts as waiting, alive or not */
};

Client c[3];

bit owed; /* an asynchronous release of the first client is not confirmed */

/* The store. */
byte key;
bit reserved; /* reserved for the woken client */
byte left; /* ticks */
bit blank; /* the blank behind the lease: clients wait */
bit listed; /* a handoff token is in the list, and lasts as long as the reservation */
#ifdef FORGETS
bit forgotten;
byte shaken; /* ticks in which exclusion may not hold, as in lease.pml; a ghost */
#define EXCUSED (shaken > 0)
#else
#define EXCUSED false
#endif

/* Ghosts. */
byte woken; /* 1 and up: the client that was woken for the reserved key; 0: none yet */
byte stays; /* ticks that the key has been reserved */

#define WAITS(i) ((i) > 0)
#define EACH(action) action(0); action(1); action(2)
#define ALL(claim) (claim(0) && claim(1) && claim(2))
#define ANY(claim) (claim(0) || claim(1) || claim(2))

#define BELIEVES(i) (c[i].at == BODY && c[i].trust > 0)
/* A client that would pass check() has the key. */
#define SOUND(i) (!BELIEVES(i) || (key == i + 1 && !reserved) || EXCUSED)
#define COUNTS(i) (c[i].counted > 0)
#define ONE_WAITS (ANY(COUNTS))
#define OUTDATE(i) c[i].handoff = (!reserved && c[i].handoff == VALID -> OVER : c[i].handoff)

inline verify() {
  key = (key == RELEASED && !owed -> OF_NO_CLIENT : key);
  woken = (reserved -> woken : 0);
  stays = (reserved -> stays : 0);
  EACH(OUTDATE);
  assert(ALL(SOUND))
}

inline ask() {
  c[me].request = SENT;
  c[me].request_trust = TRUST;
  c[me].at = ASKING
}

inline stop_asking() {
  c[me].again = 0;
  c[me].request = NOTHING;
  c[me].request_trust = 0;
  c[me].handoff = NOTHING
}

/* Its connection is closed, and its handoff token is lost with it. */
inline hang_up() {
  c[me].blocks = 0;
  c[me].handoff = NOTHING
}

inline leave() {
  stop_asking();
  hang_up();
  key = (key == me + 1 -> OF_NO_CLIENT : key);
  c[me].trust = 0;
  c[me].at = IDLE
}

/* A handoff token takes the key that is reserved for it. */
#if defined(HANDOFF_TAKES_ALL)
#define RESERVED_FOR_ME (c[me].handoff != NOTHING)
#elif defined(HANDOFF_WITHOUT_NAME)
#define RESERVED_FOR_ME (reserved && c[me].handoff != NOTHING)
#elif defined(RESERVED_FOR_ANY)
#define RESERVED_FOR_ME (reserved)
#else
#define RESERVED_FOR_ME (reserved && c[me].handoff == VALID)
#endif
#define MINE (!reserved && key == me + 1)

inline grant() {
#ifndef HANDOFF_TAKES_ALL
  /* No client overtakes the woken one as long as the key is reserved. */
  assert(!reserved || woken == me + 1);
#endif
  key = me + 1;
  reserved = 0;
  left = TTL;
  c[me].counted = 0;
  blank = (WAITS(me) && ONE_WAITS)
}

inline free_key() {
  key = FREE;
  reserved = 0;
  left = 0;
  blank = 0
}

/* [stores/redis/lua/wait_queue.lua] */
inline wake_next() {
  assert(!listed && !reserved);
  listed = 1;
  reserved = 1;
  blank = 0;
  left = RESERVED
}

#ifdef AGAIN_HANDS_OVER
#define OF_TOKEN(whose) (key == (whose))
#define WAKES (reserved || blank && ONE_WAITS)
#else
#define OF_TOKEN(whose) (key == (whose) && !reserved)
#define WAKES (blank && ONE_WAITS)
#endif
/* [stores/redis/lua/release.lua] */
inline release(whose) {
  if
  :: OF_TOKEN(whose) && WAKES -> wake_next()
  :: OF_TOKEN(whose) && !WAKES -> free_key()
  :: else
  fi
}

proctype client(byte me) {
end:
  do
  /* A client begins to acquire. [message/header.py mint_nonce] [task/acquire.py acquire] [task/hold.py hold] */
  :: d_step { c[me].at == IDLE ->
      ask() }

  /* The store carries out an acquire; a refused client that waits is counted, and the lease's value gets the blank. [stores/redis/lua/acquire.lua] [stores/redis/lua/wait_queue.lua] */
  :: d_step { c[me].request == SENT ->
      if
      :: key == FREE || MINE || RESERVED_FOR_ME ->
        grant();
        c[me].request = YES
      :: else ->
        c[me].request = NO;
        c[me].request_trust = 0;
        c[me].counted = (WAITS(me) -> COUNTED : 0);
        blank = (WAITS(me) && !reserved -> 1 : blank)
      fi;
      c[me].handoff = NOTHING;
      verify() }

  /* No reply in time: a second try with the same token; a client that was counted meanwhile is not woken. [core/locker.py Locker.acquire] */
  :: d_step { c[me].at == ASKING && !c[me].again ->
      c[me].again = 1;
      ask() }

  /* No reply, or it comes too late: release by token, which may arrive or not. [core/locker.py Locker.undo] [core/waiter.py Waiter.leave] */
  :: d_step { c[me].at == ASKING ->
      release(me + 1);
      leave();
      verify() }
  :: d_step { c[me].at == ASKING ->
      leave();
      verify() }

  /* The grant is read. [core/locker.py Locker.acquire] [core/waiter.py Waiter.leave] */
  :: d_step { c[me].request == YES && c[me].request_trust > 0 ->
      c[me].trust = c[me].request_trust;
      stop_asking();
      hang_up();
      c[me].at = BODY;
      verify() }

  /* The refusal is read: a waiting client continues to wait, the other one is skipped. [core/waiter.py Waiter.acquire] [task/acquire.py _carry_out] */
  :: d_step { c[me].request == NO ->
      if
      :: WAITS(me) ->
        stop_asking();
        c[me].at = WAITING
      :: else -> leave()
      fi }

  /* Block on the list of handoff tokens. [core/waiter.py Waiter.wait] [stores/redis/wait_queue.py RedisTicket.wait] [stores/redis/wait_queue.py RedisTicket._block] */
  :: d_step { c[me].at == WAITING && !c[me].blocks && c[me].handoff == NOTHING -> c[me].blocks = 1 }

  /* The server gives a handoff token to a blocked client, also while that client polls. [stores/redis/lua/wait_queue.lua] */
  :: d_step { c[me].blocks && listed && c[me].request != SENT ->
      c[me].handoff = VALID;
      c[me].blocks = 0;
      listed = 0;
      woken = me + 1 }

  /* Woken: acquire with the handoff token. [core/waiter.py Waiter.acquire] */
  :: d_step { c[me].at == WAITING && c[me].handoff != NOTHING ->
      ask() }

#ifndef NO_POLLING
  /* Not woken, and half a second has passed: poll. [core/waiter.py Waiter.wait] [core/waiter.py Waiter.acquire] */
  :: d_step { c[me].at == WAITING && c[me].handoff == NOTHING ->
      ask() }
#endif

  /* The ticket's connection is lost, and a handoff token with it: the client polls next. [stores/redis/wait_queue.py RedisTicket._hang_up] [core/waiter.py Waiter.wait] */
  :: d_step { c[me].at == WAITING ->
      hang_up();
#ifndef NO_POLLING
      ask();
#endif
      verify() }

  /* The time to wait has ended: the client is not counted any more. [core/waiter.py Waiter.leave] [stores/redis/wait_queue.py RedisTicket.leave] */
  :: d_step { c[me].at == WAITING ->
      c[me].counted = 0;
      leave();
      verify() }

  /* The heartbeat renews; never a key that is reserved. [stores/redis/lua/renew.lua] [core/heartbeat.py Heartbeat._apply] */
  :: d_step { BELIEVES(me) && MINE ->
      left = TTL;
      c[me].trust = TRUST }

  /* The body ends with a release that waits for its reply. [core/locker.py Locker.release] [stores/redis/lua/release.lua] */
  :: d_step { c[me].at == BODY ->
      release(me + 1);
      leave();
      verify() }

  /* The body ends with an asynchronous release. [core/locker.py Locker.give_back] [stores/redis/async_release.py PendingReleases.begin] */
  :: d_step { c[me].at == BODY && !WAITS(me) && !owed && BELIEVES(me) ->
      owed = 1;
      key = (key == me + 1 -> RELEASED : key);
      leave();
      verify() }

  /* The store carries it out; a second time if its reply was lost. [stores/redis/lua/release.lua] [stores/redis/async_release.py PendingReleases.resend_lost] [stores/redis/async_release.py PendingReleases.resend] */
  :: d_step { !WAITS(me) && owed ->
      release(RELEASED);
      verify() }

  /* It is acknowledged, or given up, or its process is dead. [stores/redis/async_release.py PendingReleases.end] */
  :: d_step { !WAITS(me) && owed ->
      owed = 0;
      verify() }

  /* SIGKILL of a client: the server drops its closed connection, and no process frees the key. [environment] */
  :: d_step { c[me].at != IDLE ->
      leave();
      verify() }
  od
}

#define COUNT_DOWN(timer) timer = (timer > 0 -> timer - 1 : 0)
#define PASS(i) COUNT_DOWN(c[i].request_trust); COUNT_DOWN(c[i].trust); COUNT_DOWN(c[i].counted)

proctype clock() {
end:
  do
  /* Time passes, and a key without time left is deleted. [core/clock.py SystemClock] */
  :: d_step {
#ifdef RESERVED_FOR_EVER
      left = (reserved -> left : (left > 0 -> left - 1 : 0));
#else
      COUNT_DOWN(left);
#endif
#ifdef FORGETS
      COUNT_DOWN(shaken);
#endif
      if
      :: reserved && left > 0 -> stays++
      :: reserved && left == 0 ->
        listed = 0;
        free_key()
      :: !reserved && left == 0 -> free_key()
      :: else
      fi;
      assert(stays < RESERVED);
      EACH(PASS);
      verify() }

  /* The store's clock is ahead of the holder's. [environment] */
  :: d_step { key != FREE && !reserved && left <= DRIFT ->
      free_key();
      verify() }
  od
}

#ifdef FORGETS
#define CUT(i) c[i].request = (c[i].request == SENT -> NOTHING : c[i].request); c[i].blocks = 0; c[i].counted = 0

proctype catastrophe() {
end:
  do
  /* The store is restarted and has lost all data; all connections are closed. [environment] */
  :: d_step { !forgotten ->
      forgotten = 1;
      free_key();
      listed = 0;
      shaken = TTL;
      EACH(CUT);
      verify() }
  od
}
#endif

init {
  atomic {
    run client(0);
    run client(1);
    run client(2);
    run clock();
#ifdef FORGETS
    run catastrophe()
#endif
  }
}

#ifdef LIVENESS
/* Whether the second client waits for a key without a holder: it is free, or reserved. */
#define STARVES ((c[1].at == WAITING || c[1].at == ASKING && c[1].request != YES) && (key == FREE || reserved))
/* No client waits for ever for a key without a holder. */
ltl no_client_starves { [] (STARVES -> <> !STARVES) }
#endif

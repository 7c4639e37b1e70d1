/* A lock with a lease, a queue and a fencing token. Its holders may be stopped past their leases at any moment, and its home killed and
 * started again. Fenced writes go to the home and to a second segment. The steps are those of csrc/sync/sync_lock.c, gate.c and smb/lock.py.
 *
 * Stopping a client is just not scheduling it; a lease runs out at any moment (up to LAPSES times). What is checked:
 *   once lock() has returned to a later holder, no write under an earlier token is accepted anywhere;
 *   tokens grow; the lock goes to whoever has waited longest, also over a restart (of those who are back in its grace);
 *   who released the lock is not told, when it asks again, that it had lost it.
 * Each planted fault (-D...) must be found: run_models.py. */
#ifndef CLIENTS
#define CLIENTS 3
#endif
#ifndef TURNS
#define TURNS 1
#endif
#ifndef LAPSES
#define LAPSES 1
#endif
#ifndef CRASHES
#define CRASHES 1
#endif

byte token;                 /* persistent: the last one granted */
bool held;                  /*             the expiry */
byte holder, holder_request;
bool released[16];          /*             by token */
byte fence[2];              /*             of the home and of the second segment; each on its own server */

byte queue[CLIENTS + 1];    /* the home's: 0, or when the client's request was first sent */
byte answer[CLIENTS + 1];   /* on its way to the client: a token */
bool grace;                 /* the home was started again: nobody is granted before those who waited are back */

byte lapses = LAPSES, crashes = CRASHES;
byte asks[CLIENTS + 1];     /* the request that waits, less one */
byte asked;                 /* counts first requests: time */
byte since[CLIENTS + 1];    /* ghost: 0, or since when the client waits */
byte entered;               /* ghost: the highest token whose lock() has returned */
byte ended;

/* kill -9 of the home: the words stay, queue and answers are gone. */
inline crash()
{
    crashes--;
    grace = true;
    for (each : 1 .. CLIENTS) {
        queue[each] = 0;
        answer[each] = 0
    }
#ifdef TOKEN_FORGOTTEN
    token = 0
#endif
}

#define FIRST(c) (queue[c] > 0 && (queue[1] == 0 || queue[c] <= queue[1]) && (queue[2] == 0 || queue[c] <= queue[2]) && \
                  (queue[CLIENTS] == 0 || queue[c] <= queue[CLIENTS]))

/* Store by store, with a kill between any two: what was not finished is as if it had not been begun. */
inline grant(to, request)
{
    token++;
    if
    :: crashes > 0 -> crash()
    :: true ->
        released[token] = false;
        fence[0] = token;
        holder = to;
        holder_request = request;
        if
        :: crashes > 0 -> crash()
        :: true ->
            for (each : 1 .. CLIENTS) {
                assert(each == to || since[each] == 0 || since[each] > since[to])
            }
            assert(token > entered);
            held = true;
            queue[to] = 0;
            answer[to] = token;
            since[to] = 0
        fi
    fi
}

/* The home, at its one kind of spontaneous step, and time. */
active proctype home()
{
    byte c, each;
    do
    :: ended == CLIENTS -> break
    :: atomic {
           !held && !grace && (queue[1] > 0 || queue[2] > 0 || queue[CLIENTS] > 0) ->
           c = (FIRST(1) -> 1 : (FIRST(2) -> 2 : CLIENTS));
           grant(c, 1 + asks[c])
       }
    :: atomic { held && lapses > 0 -> lapses--; held = false }
    :: atomic { crashes > 0 -> crash() }
#ifdef NO_GRACE
    :: atomic { grace -> grace = false }
#else
    :: atomic {
           grace && (since[1] == 0 || queue[1] > 0) && (since[2] == 0 || queue[2] > 0) &&
           (since[CLIENTS] == 0 || queue[CLIENTS] > 0) -> grace = false
       }
#endif
    od
}

proctype client(byte me)
{
    byte mine, turns = TURNS, segment, request, each;
    bool repeated, told_lost, accepted;
    do
    :: turns == 0 -> break
    :: else ->
        turns--;
        request++;
        /* LOCK: waits until it is granted; asked again with the same number, and its age, when the answer was lost */
        atomic { asked++; since[me] = asked; mine = asked; queue[me] = asked; asks[me] = request - 1 };
        do
        :: atomic { answer[me] > 0 -> mine = answer[me]; answer[me] = 0 }; break
        :: atomic {
               answer[me] == 0 && queue[me] == 0 ->
               if
               :: held && holder == me && holder_request == request -> mine = token; break
               :: else ->
                   if :: since[me] == 0 -> since[me] = mine :: else fi; /* granted, lapsed, and never known to it */
#ifdef AGE_FORGOTTEN
                   asked++;
                   queue[me] = asked
#else
                   queue[me] = since[me]
#endif
               fi
           }
        od;
        /* FENCE on the second segment, before lock() returns */
        told_lost = false;
#ifndef FENCE_NOT_RAISED
        atomic { if :: mine < fence[1] -> told_lost = true :: else -> fence[1] = mine fi };
#endif
        if
        :: !told_lost ->
            /* Who still holds it when lock() returns has entered; who lost it meanwhile will be refused. */
            atomic { if :: held && token == mine -> entered = mine :: else fi };
            segment = 0;
            do
            :: segment == 2 -> break
            :: else ->
#ifdef CHECK_THEN_WRITE
                accepted = (segment == 0 -> (held && token == mine) : mine >= fence[1]);
                atomic { assert(!accepted || mine >= entered) };
#else
                atomic {
                    accepted = (segment == 0 -> (held && token == mine) : mine >= fence[1]);
                    if :: accepted && segment == 1 && mine > fence[1] -> fence[1] = mine :: else fi;
                    assert(!accepted || mine >= entered)
                };
#endif
                segment++
            od
        :: else
        fi;
        /* UNLOCK, perhaps said again because the answer was lost */
        repeated = false;
        do
        :: atomic {
               if
               :: held && token == mine -> released[mine] = true; held = false; told_lost = false
#ifdef REPEATED_IS_LOST
               :: else -> told_lost = true
#else
               :: !(held && token == mine) -> told_lost = !released[mine]
#endif
               fi;
               assert(!(repeated && told_lost)); /* it was told OK at first, though that answer was lost */
           };
           if
           :: !told_lost && !repeated -> repeated = true
           :: break
           fi
        od;
        mine = 0
    od;
    ended++
}

init
{
    byte each;
    atomic {
        for (each : 1 .. CLIENTS) {
            run client(each)
        }
    }
}

/* A lock with a lease, a queue and a fencing token, its holders stopped past their leases at any moment, and its home killed and started
 * again. Fenced writes go to the home and to a second segment. The steps are those of csrc/sync.c, gate.c and smb/lock.py.
 *
 * Stopping a client is just not scheduling it; a lease runs out at any moment (up to LAPSES times). Once lock() has returned to
 * a later holder, no write under an earlier token may be accepted anywhere. Each planted fault (-D...) must be found. */
#define CLIENTS 2
#ifndef LAPSES
#define LAPSES 2
#endif
#ifndef CRASHES
#define CRASHES 1
#endif

byte token;                 /* persistent: the last one granted */
bool held;                  /*             the expiry */
byte holder, holder_request;
bool released[8];           /*             by token */
byte fence[2];              /*             of the home and of the second segment */

byte lapses = LAPSES, crashes = CRASHES;
byte life;                  /* of the home's daemon: what waits there is gone with it */
byte entered;               /* ghost: the highest token whose lock() has returned */
byte last_token;            /* ghost */
byte asked, served;         /* ghosts: order of arrival, of those that never lost their place */
bool disturbed;             /* ghost: a restart; the order is then the clients' ages */

/* Persistent stores one by one, a crash between any two: what was not finished is as if it had not been begun. */
inline grant(client, request)
{
    token++;
#ifdef TOKEN_FORGOTTEN
    if :: crashes > 0 -> crashes--; life++; disturbed = true; token = 0 :: true fi;
#endif
    if
    :: crashes > 0 -> crashes--; life++; disturbed = true; holding = false
    :: true ->
        released[token] = false;
        fence[0] = token;
        holder = client;
        holder_request = request;
        held = true;
        holding = true
    fi
}

proctype client(byte me)
{
    byte mine, request = 1, place, born; bool holding, repeated, told_lost, accepted;
    byte turns = 2, segment;
    do
    :: turns == 0 -> break
    :: else ->
        turns--;
        /* LOCK: parked until it is granted; repeated with the same request number after a restart or a lost answer */
        atomic { asked++; place = asked };
        holding = false;
        do
        :: atomic {
               held && holder == me && holder_request == request -> holding = true /* granted before: the same answer */
           };
           break
        :: atomic {
               !held && (disturbed || place == served + 1) -> grant(me, request);
               if
               :: holding -> if :: !disturbed -> served++ :: else fi
               :: else
               fi
           };
           if :: holding -> break :: else fi
        od;
        mine = token;
        atomic { assert(mine > last_token || held == false || holder != me || mine == last_token); if :: mine > last_token -> last_token = mine :: else fi };
        /* FENCE on the second segment, before lock() returns */
        told_lost = false;
#ifndef FENCE_NOT_RAISED
        atomic { if :: mine < fence[1] -> told_lost = true :: else -> fence[1] = mine fi };
#endif
        if
        :: !told_lost ->
            atomic {
                /* only who still holds it when lock() returns has entered; who lost it meanwhile will be refused */
                if :: held && token == mine -> assert(mine > entered || mine == entered); entered = mine :: else fi
            };
            segment = 0;
            do
            :: segment == 2 -> break
            :: else ->
#ifdef CHECK_THEN_WRITE
                accepted = (segment == 0 -> (held && token == mine) : mine >= fence[1]);
                skip;
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
        /* UNLOCK, perhaps repeated because the answer was lost */
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
        request++;
        mine = 0
    od
}

/* Time: a lease runs out. */
active proctype clock()
{
    do
    :: atomic { held && lapses > 0 -> held = false; lapses-- }
    :: atomic { crashes > 0 -> crashes--; life++; disturbed = true } /* kill -9 of the home: the words stay */
    :: break
    od
}

init
{
    atomic { run client(1); run client(2) }
}

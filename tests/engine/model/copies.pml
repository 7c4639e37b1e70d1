/* A segment with two copies: primary, backup and coordinator, two clients that draw tickets (fetch_add) and one that reads. A host
 * dies with its memory and is back empty, also before its loss was noticed; the two servers do not reach each other, the coordinator does
 * not reach one: at any step, and it ends at any step. What becomes of memory that the coordinator does not know: quarantine.pml.
 * The steps are those of csrc/server/replica.c, feed.c, gate.c and smb/coordinator/replicas.py; docs/decisions/0025 explains them.
 *
 * What is checked:
 *   the server that the record calls the primary has every acknowledged draw, if the record means this run of it;
 *   no ticket is given twice, none is below what was acknowledged or read before it was asked for;
 *   no read is older than what was acknowledged, or read, before it was asked for;
 *   in the end every draw counts once, and the copies are equal.
 * Each planted fault (-D...) must be found: run_models.py. */
#ifndef DRAWS
#define DRAWS 2
#endif
#ifndef READS
#define READS 2
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef CUTS
#define CUTS 1
#endif
#ifndef SILENCES
#define SILENCES 1
#endif
#ifndef CLIENTS
#define CLIENTS 2                   /* that draw: 0 and 1 */
#endif
#define READER 2                    /* as a client */
#define ASK 3                       /* in place of a client in a forwarded frame: are you still the backup? */
#define NOBODY 2
#define OTHER(s) (1 - (s))

mtype = { NONE, PRIMARY, BACKUP, OK, STALE };

/* The coordinator's record. */
byte rec_primary = 0, rec_backup = 1, rec_epoch = 1;

/* Of each server: what it was told, */
mtype role[2] = { PRIMARY, BACKUP };
byte epoch[2] = { 1, 1 };
bool backed[2] = { true, false };   /* a primary's: changes wait for a backup */
bool lease[2] = { true, false };    /* runs, by its own clock */
/* and its memory. */
byte value[2], watermark[4], result[4]; /* the last two by 2 * server + client */
bool alive[2] = { true, true };
bool fresh[2];                      /* runs, and has not registered: in the record another run of it has the copy, which is gone */
/* A read in hand: the bytes, and how many changes have to be confirmed first. */
bool reads[2], asked[2]; byte turn_of[2], copied[2], unconfirmed[2];

bool cut;                           /* the two do not reach each other */
bool silent[2];                     /* the coordinator and this one */
byte deaths = DEATHS, cuts = CUTS, silences = SILENCES;

chan to_server[2] = [3] of { byte, byte, byte };    /* client, sequence, epoch */
chan to_client[3] = [3] of { byte, byte };          /* sequence, ticket or value */
chan forwarded[2] = [3] of { byte, byte, byte };    /* from this server: client or ASK, sequence, epoch */
chan answered[2] = [3] of { mtype };                /* to this server, in the same order */
chan in_order[2] = [3] of { byte, byte };           /* of a primary: changes, and an ASK, that are not confirmed */

byte acked, seen, done;             /* ghosts: draws that were answered; the highest value that was read; clients at their end */
bool given[8];                      /*         tickets */

#define FLOOR (acked > seen -> acked : seen)
#define SERVES(s) (role[s] == PRIMARY && epoch[s] == rec_epoch)
/* The run in the record is there. That somebody answers at its port says nothing of it. */
#ifdef BY_PORT
#define PRESENT(s) (alive[s])
#else
#define PRESENT(s) (alive[s] && !fresh[s])
#endif

/* The connection between the two breaks: what was on its way is gone. */
inline disconnect()
{
    for (i : 0 .. 1) {
        do :: nempty(forwarded[i]) -> forwarded[i] ? x, y, z :: empty(forwarded[i]) -> break od;
        do :: nempty(answered[i]) -> answered[i] ? what :: empty(answered[i]) -> break od
    }
}

/* One change, or an ASK, is confirmed: the oldest. */
inline confirm(s)
{
    in_order[s] ? x, y;
    if
    :: x == ASK -> asked[s] = false; if :: reads[s] -> reads[s] = false; to_client[READER] ! turn_of[s], copied[s] :: else fi
    :: else ->
#ifndef ANSWER_EARLY
        to_client[x] ! y, result[2 * s + x];
#endif
        if :: reads[s] && unconfirmed[s] > 0 -> unconfirmed[s]-- :: else fi
    fi
}

/* No backup has to confirm anything any more. */
inline alone(s)
{
    backed[s] = false;
    n = len(in_order[s]);
    do :: n > 0 -> n--; confirm(s) :: n == 0 -> break od
}

/* A server that has no role any more gives up what it had in hand; its clients ask the coordinator. */
inline give_up(s)
{
    do :: nempty(in_order[s]) -> in_order[s] ? x, y :: empty(in_order[s]) -> break od;
    reads[s] = false;
    turn_of[s] = 0;
    copied[s] = 0;
    unconfirmed[s] = 0;
    asked[s] = false;
    backed[s] = false
}

proctype server(byte me)
{
    byte c, q, e, x, y, i, n;
    bool waits;
end:
    do
    /* A request. */
    :: atomic {
           alive[me] && nempty(to_server[me]) && nfull(to_client[0]) && nfull(to_client[1]) && nfull(to_client[READER]) &&
           !(reads[me] && to_server[me] ? [READER, _, _]) ->
           to_server[me] ? c, q, e;
           if
           :: role[me] != PRIMARY || e != epoch[me] /* STALE_EPOCH: its client will ask the coordinator */
           :: else ->
               if
               :: c == READER ->
                   reads[me] = true;
                   turn_of[me] = q;
                   copied[me] = value[me];
#ifdef DIRTY_READ
                   unconfirmed[me] = 0
#else
                   unconfirmed[me] = len(in_order[me]) - (asked[me] -> 1 : 0)
#endif
               :: c != READER && q <= watermark[2 * me + c] -> /* a repetition: answered when it is confirmed */
                   waits = in_order[me] ?? [eval(c), eval(q)];
                   if :: waits -> waits = false :: else -> to_client[c] ! q, result[2 * me + c] fi
               :: else ->
                   result[2 * me + c] = value[me];
                   watermark[2 * me + c] = q;
                   value[me]++;
                   if
                   :: backed[me] ->
                       in_order[me] ! c, q;
                       if :: !cut && alive[OTHER(me)] -> forwarded[me] ! c, q, e :: else fi;
#ifdef ANSWER_EARLY
                       to_client[c] ! q, result[2 * me + c]
#endif
                   :: else -> to_client[c] ! q, result[2 * me + c]
                   fi
               fi
           fi;
           c = 0; q = 0; e = 0
       }
    /* A read whose changes are confirmed: answered while the lease runs, and where there is no other copy. Else the backup is asked. */
    :: atomic {
           alive[me] && reads[me] && !asked[me] && unconfirmed[me] == 0 && nfull(to_client[READER]) ->
           if
           :: lease[me] || !backed[me] -> reads[me] = false; to_client[READER] ! turn_of[me], copied[me]
           :: else ->
               asked[me] = true;
               in_order[me] ! ASK, 0;
               if :: !cut && alive[OTHER(me)] -> forwarded[me] ! ASK, 0, epoch[me] :: else fi
           fi
       }
    /* As a backup: a change of the primary, through the gate. */
    :: atomic {
           alive[me] && nempty(forwarded[OTHER(me)]) && nfull(answered[OTHER(me)]) ->
           forwarded[OTHER(me)] ? c, q, e;
           if
           :: role[me] != BACKUP || e != epoch[me] -> answered[OTHER(me)] ! STALE
           :: else ->
               if
               :: c == ASK || q <= watermark[2 * me + c]
               :: else ->
#ifndef RESULT_NOT_FORWARDED
                   result[2 * me + c] = value[me];
#endif
#ifndef RECORD_NOT_FORWARDED
                   watermark[2 * me + c] = q;
#endif
                   value[me]++
               fi;
               answered[OTHER(me)] ! OK
           fi;
           c = 0; q = 0; e = 0
       }
    /* As a primary: the backup's answer. One that is not the backup any more confirms nothing: the coordinator will say what holds. */
    :: atomic {
           alive[me] && nempty(answered[me]) && nfull(to_client[0]) && nfull(to_client[1]) && nfull(to_client[READER]) ->
           if
           :: answered[me] ? OK -> if :: len(in_order[me]) > 0 -> confirm(me) :: else fi
           :: answered[me] ? STALE
           fi;
           x = 0; y = 0
       }
#ifdef GOES_ALONE
    :: atomic { alive[me] && role[me] == PRIMARY && backed[me] && cut -> alone(me) }
#endif
    /* The coordinator's word, with the answer to a renewal. */
    :: atomic {
           alive[me] && !fresh[me] && !silent[me] && nfull(to_client[0]) && nfull(to_client[1]) && nfull(to_client[READER]) &&
           (epoch[me] != rec_epoch || (me == rec_primary && !lease[me])) && (me == rec_primary || me == rec_backup || role[me] != NONE) ->
           epoch[me] = rec_epoch;
           if
           :: me == rec_primary ->
               role[me] = PRIMARY;
               lease[me] = true;
               if
               :: rec_backup == NOBODY && backed[me] -> alone(me)
               :: else -> backed[me] = rec_backup != NOBODY
               fi
           :: me == rec_backup -> role[me] = BACKUP
           :: else -> role[me] = NONE; lease[me] = false; give_up(me)
           fi;
           x = 0; y = 0
       }
    od
}

active proctype coordinator()
{
    byte x, y, z, i; mtype what;
end:
    do
    /* The primary's host is known to be dead, or its lease has run out. */
    :: atomic {
           rec_backup != NOBODY && PRESENT(rec_backup) && !silent[rec_backup] &&
           (!PRESENT(rec_primary) || (silent[rec_primary]
#ifndef NO_WAIT
            && !lease[rec_primary]
#endif
            )) ->
           rec_primary = rec_backup;
           rec_backup = NOBODY;
           rec_epoch++
       }
    /* The two do not reach each other: that costs the backup its role, never the primary. */
    :: atomic {
           rec_backup != NOBODY && PRESENT(rec_primary) && (cut || !PRESENT(rec_backup) || fresh[rec_primary]) ->
           rec_backup = NOBODY;
           rec_epoch++
       }
    /* A new run registers, with nothing. The other copy goes on alone. */
    :: atomic {
           (alive[0] && fresh[0] && !silent[0]) || (alive[1] && fresh[1] && !silent[1]) ->
           i = (alive[0] && fresh[0] && !silent[0] -> 0 : 1);
           fresh[i] = false;
           if
           :: rec_backup != NOBODY -> rec_primary = OTHER(i); rec_backup = NOBODY; rec_epoch++
           :: else
           fi;
           i = 0
       }
    /* A new copy, between two changes; both are told. */
    :: atomic {
           rec_backup == NOBODY && PRESENT(0) && PRESENT(1) && !cut && !silent[0] && !silent[1] && SERVES(rec_primary) && rec_epoch < 4 &&
           role[OTHER(rec_primary)] == NONE && empty(in_order[rec_primary]) && !reads[rec_primary] ->
           disconnect();
           rec_backup = OTHER(rec_primary);
           rec_epoch++;
           epoch[0] = rec_epoch;
           epoch[1] = rec_epoch;
           role[rec_backup] = BACKUP;
           backed[rec_primary] = true;
           value[rec_backup] = value[rec_primary];
           for (i : 0 .. 1) {
               watermark[2 * rec_backup + i] = watermark[2 * rec_primary + i];
               result[2 * rec_backup + i] = result[2 * rec_primary + i]
           };
           i = 0
       }
    od
}

/* What happens to servers and networks; the last copy that there is does not vanish. */
active proctype world()
{
    byte x, y, z, i, s; mtype what;
end:
    do
    :: atomic {
           deaths > 0 ->
           deaths--;
           if
           :: (rec_backup != NOBODY && alive[1] && !fresh[1]) || rec_primary == 1 -> s = 0
           :: (rec_backup != NOBODY && alive[0] && !fresh[0]) || rec_primary == 0 -> s = 1
           fi;
           disconnect();
           do :: nempty(to_server[s]) -> to_server[s] ? x, y, z :: empty(to_server[s]) -> break od;
           give_up(s);
           alive[s] = false; lease[s] = false; role[s] = NONE; epoch[s] = 0; value[s] = 0;
           for (i : 0 .. 1) {
               watermark[2 * s + i] = 0;
               result[2 * s + i] = 0
           };
           x = 0; y = 0; z = 0; i = 0; s = 0
       }
    :: atomic { !alive[0] -> alive[0] = true; fresh[0] = rec_primary == 0 || rec_backup == 0 }
    :: atomic { !alive[1] -> alive[1] = true; fresh[1] = rec_primary == 1 || rec_backup == 1 }
    :: atomic { cuts > 0 && !cut -> cuts--; cut = true; disconnect(); x = 0; y = 0; z = 0; i = 0 }
    /* A new connection: all that is not confirmed is sent again, in its order. */
    :: atomic {
           cut ->
           cut = false;
           for (s : 0 .. 1) {
               i = len(in_order[s]);
               do
               :: i > 0 -> i--; in_order[s] ? x, y; in_order[s] ! x, y; if :: alive[OTHER(s)] -> forwarded[s] ! x, y, epoch[s] :: else fi
               :: i == 0 -> break
               od
           };
           x = 0; y = 0; s = 0
       }
    :: atomic { silences > 0 && !silent[0] -> silences--; silent[0] = true }
    :: atomic { silences > 0 && !silent[1] -> silences--; silent[1] = true }
    :: atomic { silent[0] -> silent[0] = false }
    :: atomic { silent[1] -> silent[1] = false }
    :: atomic { silent[0] && lease[0] -> lease[0] = false }
    :: atomic { silent[1] && lease[1] -> lease[1] = false }
    od
}

/* Draws tickets, or reads, of the server that it knows. It asks the coordinator at any time, and says the same again
 * to the one that serves in a later epoch. */
proctype client(byte me)
{
    byte turn, q, floor, where, e = 1, number; bool sent;
    do
    :: turn == (me == READER -> READS : DRAWS) -> break
    :: else ->
        atomic { turn++; floor = FLOOR; sent = false };
        do
        :: atomic { to_client[me] ? q, number -> if :: q == turn -> break :: else fi }
        :: atomic { !sent && alive[where] && nfull(to_server[where]) -> sent = true; to_server[where] ! me, turn, e }
        :: atomic {
               SERVES(rec_primary) && (rec_primary != where || rec_epoch != e) && nfull(to_server[rec_primary]) ->
               where = rec_primary;
               e = rec_epoch;
               sent = true;
               to_server[where] ! me, turn, e
           }
        od;
        atomic {
            assert(number >= floor);
            if
            :: me == READER -> seen = (number > seen -> number : seen)
            :: else -> assert(!given[number]); given[number] = true; acked++
            fi;
            number = 0; q = 0; floor = 0
        }
    od;
    done++;
end:
    do :: to_client[me] ? q, number -> q = 0; number = 0 od
}

active proctype judge()
{
end:
    atomic {
        alive[rec_primary] && !fresh[rec_primary] && (value[rec_primary] < acked || value[rec_primary] > CLIENTS * DRAWS) ->
        assert(value[rec_primary] >= acked);
        assert(value[rec_primary] <= CLIENTS * DRAWS)
    }
}

active proctype last()
{
end:
    atomic {
        done == CLIENTS + 1 && rec_backup != NOBODY && role[rec_primary] == PRIMARY && role[rec_backup] == BACKUP &&
        epoch[rec_primary] == rec_epoch && epoch[rec_backup] == rec_epoch && empty(in_order[rec_primary]) &&
        empty(to_server[0]) && empty(to_server[1]) ->
        assert(value[rec_primary] == CLIENTS * DRAWS && value[rec_backup] == CLIENTS * DRAWS)
    }
}

init
{
    byte each;
    atomic {
        run server(0);
        run server(1);
        for (each : 1 .. CLIENTS) {
            run client(each - 1)
        }
        run client(READER)
    }
}

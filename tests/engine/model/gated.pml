/* A segment with one copy is gated, copied to another server and moves there, while it is used: by two clients that have it mapped, of
 * which one draws tickets (fetch_add) and one reads, and by one that draws over a connection whose answers may be lost.
 * The steps are those of csrc/memory/change.c, csrc/server/gate.c, replica.c and copy.c; docs/decisions.md, 0035 explains them.
 *
 * What is checked:
 *   no ticket of a chunk is given twice, none is below what was acknowledged before it was asked for;
 *   no read is older than what was acknowledged before it was asked for;
 *   in the end every draw counts once, where the segment is then.
 * Each planted fault (-D...) must be found: run_models.py. */
#ifndef DRAWS
#define DRAWS 2
#endif
#ifndef READS
#define READS 2
#endif
#ifndef DEATHS
#define DEATHS 1                    /* of the server that it is copied to, before it has moved */
#endif
#define CHUNKS 2
#define TICKETS 8                   /* of a chunk, at most */

/* The drained server, and the memory that local clients have mapped. */
byte value[CHUNKS];
bool locked[CHUNKS];
bool roles;                         /* the daemon has taken a role for the segment: frames see that */
bool gated;                         /* the word in the header: who has it mapped sees that */
byte mark;                          /* the lane's record: its last change that was made */
bool in_use;                        /*         a change of it is under way: the record is about to be written */
/* The other server. */
byte there[CHUNKS], mark_there;
bool copied[CHUNKS], record_copied;
bool moved;

byte deaths = DEATHS;
byte acked[CHUNKS], done;           /* ghosts: draws that were answered; clients at their end */
bool given[CHUNKS * TICKETS];       /*         tickets */

#ifdef RECORD_IN_USE
#define RECORD_RESTS true
#else
#define RECORD_RESTS (!in_use)
#endif
#ifdef COPIED_UNLOCKED
#define RESTS(c) true
#else
#define RESTS(c) (!locked[c])
#endif
#ifdef MOVED_EARLY
#define WHOLE copied[0]
#else
#define WHOLE (copied[0] && copied[1])
#endif

inline account(c, ticket, floor)
{
    assert(ticket >= floor && !given[c * TICKETS + ticket]);
    given[c * TICKETS + ticket] = true;
    acked[c]++
}

/* A draw in the epoch of the roles: by the server that is the primary, which forwards what is behind its chunk in the copy. */
inline draw_of_primary(c, ticket)
{
    if
    :: atomic { moved -> ticket = there[c]; there[c]++ }
    :: atomic {
           roles && gated && !moved && !locked[c] ->
           ticket = value[c];
           value[c]++;
#ifndef NOT_FORWARDED
           if :: copied[c] -> there[c]++ :: else fi
#endif
       }
    fi
}

/* Has the segment mapped. */
proctype drawer()
{
    byte turn, c, ticket, floor, old;
    do
    :: turn == DRAWS -> break
    :: else ->
        turn++;
        atomic { if :: c = 0 :: c = 1 fi; floor = acked[c] };
        if
        :: gated -> draw_of_primary(c, ticket)
        :: !gated ->
            atomic { !locked[c] -> locked[c] = true };
            if
#ifndef NO_LOOK
            :: gated -> locked[c] = false; draw_of_primary(c, ticket)
            :: !gated ->
#else
            :: true ->
#endif
                old = value[c];
                value[c] = old + 1;
                atomic { ticket = old; old = 0; locked[c] = false }
            fi
        fi;
        atomic { account(c, ticket, floor); ticket = 0; floor = 0; c = 0 }
    od;
    done++
}

/* Has it mapped, and reads a chunk without its lock: whole, as sequence counts see to. */
proctype reader()
{
    byte turn, c, number, floor;
    bool looked;
    do
    :: turn == READS -> break
    :: else ->
        turn++;
        atomic { if :: c = 0 :: c = 1 fi; floor = acked[c] };
        if
#ifdef LOOKS_ONCE
        :: looked -> atomic { !locked[c] -> number = value[c] }
        :: !looked && !gated -> looked = true; atomic { !locked[c] -> number = value[c] }
        :: !looked && gated ->
#else
        :: !gated -> atomic { !locked[c] -> number = value[c] }
        :: gated ->
#endif
            if
            :: atomic { moved -> number = there[c] }
            :: atomic { !moved && roles && !locked[c] -> number = value[c] }
            fi
        fi;
        atomic { assert(number >= floor); number = 0; floor = 0; c = 0 }
    od;
    done++
}

/* Draws over a connection, by a lane that it leaves when it is sent away; what became of the last draw there it asks who serves then. */
proctype caller()
{
    byte turn, c, ticket, floor, old, asked;
    bool alone, refused, lost, made;
    do
    :: turn == DRAWS -> break
    :: else ->
        turn++;
        atomic { if :: c = 0 :: c = 1 fi; floor = acked[c] };
        made = false;
        refused = true;
        if
        :: gated || asked -> skip
        :: else ->
            /* One request in the daemon: admitted, its record taken, the chunk locked, looked at, changed, noted. */
            alone = !roles;
            if
            :: !alone -> skip
            :: alone ->
                in_use = true;
                atomic { !locked[c] -> locked[c] = true };
                if
#ifndef NO_LOOK_OF_FRAMES
                :: roles -> locked[c] = false
                :: !roles ->
#else
                :: true ->
#endif
                    refused = false;
                    old = value[c];
                    value[c] = old + 1;
                    mark = turn;
                    atomic { ticket = old; old = 0; locked[c] = false }
                fi;
                in_use = false
            fi;
            atomic { if :: !refused -> if :: lost = true :: lost = false; made = true fi :: else fi }
        fi;
        if
        :: made -> skip
        :: !made ->
            /* Sent away, or the answer is lost: the server that serves has the lane's record. Nothing more is made on that lane. */
            if
            :: !lost -> skip
            :: lost ->
                atomic {
#ifdef PAST_FORGOTTEN
                    roles ->
#else
                    if
                    :: moved -> made = mark_there >= turn
                    :: !moved && !in_use -> made = mark >= turn
                    fi;
#endif
                    lost = false
                }
            fi;
            if
            :: made -> skip
            :: else ->
                if
                :: roles -> asked = true; draw_of_primary(c, ticket)
                fi
            fi
        fi;
        atomic { account(c, ticket, floor); ticket = 0; floor = 0; c = 0; alone = false; refused = false; made = false }
    od;
    done++
}

/* The drained server gates, and copies: first records, none that is in use; then each chunk, under its lock. */
active proctype copier()
{
    byte c;
    roles = true;
    gated = true;
    do
    :: moved -> break
    :: atomic { !moved && !record_copied && RECORD_RESTS -> mark_there = mark; record_copied = true }
    :: atomic { !moved && record_copied && !copied[0] && RESTS(0) -> there[0] = value[0]; copied[0] = true }
    :: atomic { !moved && record_copied && !copied[1] && RESTS(1) -> there[1] = value[1]; copied[1] = true }
    :: atomic { !moved && WHOLE -> moved = true }
    /* The other server dies: the copy begins anew. */
    :: atomic {
           !moved && deaths > 0 && record_copied ->
           deaths--;
           record_copied = false; copied[0] = false; copied[1] = false;
           there[0] = 0; there[1] = 0; mark_there = 0
       }
    od
}

active proctype last()
{
    atomic {
        done == 3 && moved ->
        assert(there[0] == acked[0] && there[1] == acked[1])
    }
}

init
{
    atomic { run drawer(); run reader(); run caller() }
}

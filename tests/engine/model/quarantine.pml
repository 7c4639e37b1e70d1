/* When memory may be destroyed: one buffer of one segment on two servers, the coordinator's store, and a backup of that store that is
 * restored while servers go on. Servers die with their memory or keep it, and are back before anybody noticed; the coordinator begins anew
 * and has heard of nobody; copies are made, lost and moved; the buffer is deleted. Each step is one change that is stored and told.
 *
 * A segment carries its order (the epoch in which it had its last role) and a stamp: the term of the coordinator that said so, and how many
 * changes that term had stored. A term is a run of a coordinator that leads; a store knows the terms it has lived through, and how far each
 * came. So a store that is older than a segment is known by its stamp, also when the store has gone on since: numbers alone do not tell.
 *
 * What is checked: what a destroyed segment had is in the other one, or the buffer was deleted. Each planted fault (-D...) must be found:
 * run_models.py. */
#ifndef CHANGES
#define CHANGES 2
#endif
#ifndef DEATHS
#define DEATHS 2
#endif
#ifndef RESTORES
#define RESTORES 1
#endif
#ifndef EPOCHS
#define EPOCHS 5
#endif
#define TERMS 3
#define NOBODY 2
#define OTHER(s) (1 - (s))

/* Of each server. */
bool alive[2] = { true, true };
bool heard[2];                      /* this run has registered with this coordinator in this term */
bool has[2], primary[2], backed[2]; /* the segment; its role; a primary's: changes wait for the backup */
byte data[2], order[2];             /* changes, a bit each */
byte stamp_term[2], stamp_at[2];

/* The store: the buffer's record, and the terms. */
bool there, saved_there;
byte rec_primary, rec_backup = NOBODY, rec_epoch, saved_primary, saved_backup = NOBODY, saved_epoch;
byte reached[TERMS], saved_reached[TERMS]; /* changes stored in each; 0: a term that this store has not lived through */
byte term;
bool saved;

byte changes, deaths = DEATHS, restores = RESTORES;
bool deleted, created;              /* ghosts: its deletion was answered */

/* Whether the store is at least as new as the segment's last role. */
#ifdef NUMBERS_ALONE
#define SUM(r) (r[0] + r[1] + r[2])
byte stamp_sum[2];
#define KNOWN(s) (SUM(reached) >= stamp_sum[s])
#else
#define KNOWN(s) (reached[stamp_term[s]] >= stamp_at[s])
#endif
/* Whether the coordinator goes by its record, of what it finds there. */
#ifdef DROPS_UNKNOWN
#define TAKEN(s) true
#else
#define TAKEN(s) KNOWN(s)
#endif
/* Whether an epoch of the record's is later than one that it does not know of. */
#ifdef EPOCHS_ALONE
#define COMPARED(s) true
#else
#define COMPARED(s) KNOWN(s)
#endif
/* Whether the other one's run has confirmed a whole copy of at least this order. */
#ifdef RECORD_COUNTS
#define CONFIRMED(o, s) (has[o] || !heard[o])
#else
#define CONFIRMED(o, s) (heard[o] && has[o] && order[o] >= order[s])
#endif

inline forget(s)
{
    has[s] = false; primary[s] = false; backed[s] = false; data[s] = 0; order[s] = 0; stamp_term[s] = 0; stamp_at[s] = 0;
#ifdef NUMBERS_ALONE
    stamp_sum[s] = 0;
#endif
}

inline store_change() { reached[term]++ }

/* The one gate: a segment that nobody needs is destroyed, or it stays. */
inline give_up(s)
{
    primary[s] = false;
    backed[s] = false;
    if
#ifdef DROPS_UNKNOWN
    :: has[s] ->
#else
    :: has[s] && (!there && KNOWN(s) ||
       (there && s != rec_primary && s != rec_backup && COMPARED(s) && rec_primary == OTHER(s) && CONFIRMED(OTHER(s), s))) ->
#endif
        assert(deleted || (has[OTHER(s)] && (data[s] & ~data[OTHER(s)]) == 0));
        forget(s)
    :: else
    fi
}

/* A server that is there hears what the record says of it. */
inline tell(s)
{
    if
    :: !heard[s] || !has[s]
    :: heard[s] && has[s] ->
        if
        :: there && (s == rec_primary || s == rec_backup) ->
            order[s] = rec_epoch;
            stamp_term[s] = term;
            stamp_at[s] = reached[term];
#ifdef NUMBERS_ALONE
            stamp_sum[s] = SUM(reached);
#endif
            primary[s] = s == rec_primary;
            backed[s] = s == rec_primary && rec_backup != NOBODY
        :: else -> give_up(s)
        fi
    fi
}

inline tell_both() { tell(rec_primary); tell(OTHER(rec_primary)) }

/* A run registers with what it has. */
inline register(s)
{
    heard[s] = true;
    if
    :: there && s == rec_primary && rec_backup != NOBODY && (!has[s] || (KNOWN(s) && !primary[s])) -> /* empty, or started again */
        if
        :: has[OTHER(s)] && heard[OTHER(s)] && KNOWN(OTHER(s)) ->
            rec_primary = OTHER(s); rec_backup = NOBODY; rec_epoch++; store_change(); tell_both()
        :: else
        fi
    :: there && s == rec_backup && (!has[s] || (KNOWN(s) && order[s] != rec_epoch)) -> /* empty, or older than the record */
        rec_backup = NOBODY; rec_epoch++; store_change(); tell_both()
#ifndef DROPS_UNKNOWN
    :: there && has[s] && !KNOWN(s) && order[s] > rec_epoch && primary[s] -> /* the record is older: it is taken up as it is */
        rec_epoch = order[s] + 1;
        rec_backup = NOBODY;
        rec_primary = s;
        store_change();
        tell_both()
    :: there && has[s] && !KNOWN(s) && !(order[s] > rec_epoch && primary[s]) -> /* quarantined */
        primary[s] = false
#endif
    :: there && has[s] && s == rec_backup && TAKEN(s) && order[s] == rec_epoch -> tell(s)
    :: there && has[s] && s == rec_primary && TAKEN(s) && (rec_backup == NOBODY || primary[s]) -> tell(s)
    :: else -> if :: has[s] && (!there || (s != rec_primary && s != rec_backup)) -> give_up(s) :: else fi
    fi
}

active proctype everything()
{
    byte i;
    reached[0] = 1;
end:
    do
    /* Clients. */
    :: atomic {
           !created && heard[0] && (heard[1] || !alive[1]) ->
           created = true; there = true; rec_primary = 0; rec_backup = NOBODY; rec_epoch = 1;
           has[0] = true;
           store_change();
           tell(0)
       }
    :: atomic {
           i = 0;
           if :: true :: i = 1 fi;
           if
           :: changes < CHANGES && alive[i] && has[i] && primary[i] && !backed[i] ->
               data[i] = data[i] | (1 << changes); changes++; deleted = deleted && !there
           :: changes < CHANGES && alive[i] && has[i] && primary[i] && backed[i] && alive[OTHER(i)] && has[OTHER(i)] &&
              !primary[OTHER(i)] && order[OTHER(i)] == order[i] ->
               data[i] = data[i] | (1 << changes);
               data[OTHER(i)] = data[OTHER(i)] | (1 << changes);
               changes++;
               deleted = deleted && !there
           :: else
           fi;
           i = 0
       }
    :: atomic { there -> there = false; deleted = true; store_change(); tell(0); tell(1) }

    /* The coordinator. A run that is not the record's is dead, whoever answers at its port. */
    :: atomic { alive[0] && !heard[0] -> register(0) }
    :: atomic { alive[1] && !heard[1] -> register(1) }
    :: atomic {
           there && rec_backup != NOBODY && heard[rec_backup] && has[rec_backup] && KNOWN(rec_backup) &&
           order[rec_backup] == rec_epoch && !heard[rec_primary] && rec_epoch < EPOCHS ->
           rec_primary = rec_backup; rec_backup = NOBODY; rec_epoch++; store_change(); tell_both()
       }
    :: atomic {
           there && rec_backup != NOBODY && rec_epoch < EPOCHS &&
#ifdef BY_PORT
           alive[rec_primary] ->
#else
           heard[rec_primary] && has[rec_primary] && primary[rec_primary] && KNOWN(rec_primary) ->
#endif
           rec_backup = NOBODY; rec_epoch++; store_change(); tell_both()
       }
    :: atomic { /* what only a server outside the record has is taken up */
           there && heard[0] && heard[1] && !has[rec_primary] && has[OTHER(rec_primary)] && rec_epoch < EPOCHS && order[OTHER(rec_primary)] < EPOCHS ->
           rec_primary = OTHER(rec_primary);
           rec_backup = NOBODY;
           rec_epoch = (order[rec_primary] > rec_epoch -> order[rec_primary] : rec_epoch) + 1;
           store_change();
           tell_both()
       }
    :: atomic { /* a copy */
           there && rec_backup == NOBODY && rec_epoch < EPOCHS && heard[0] && heard[1] && has[rec_primary] && primary[rec_primary] &&
           KNOWN(rec_primary) && !has[OTHER(rec_primary)] ->
           rec_backup = OTHER(rec_primary);
           rec_epoch++;
           store_change();
           has[rec_backup] = true;
           data[rec_backup] = data[rec_primary];
           tell_both()
       }
    :: atomic { /* it moves: the copy that leaves is surplus, and goes */
           there && rec_backup != NOBODY && rec_epoch < EPOCHS && heard[rec_primary] && has[rec_primary] && primary[rec_primary] &&
           order[rec_primary] == rec_epoch ->
           rec_primary = rec_backup; rec_backup = NOBODY; rec_epoch++; store_change(); tell_both()
       }
    /* It begins anew; with a store that was saved before. */
    :: atomic { !saved && restores > 0 && term == 0 ->
           saved = true;
           saved_there = there; saved_primary = rec_primary; saved_backup = rec_backup; saved_epoch = rec_epoch;
           for (i : 0 .. TERMS - 1) { saved_reached[i] = reached[i] };
           i = 0
       }
    :: atomic { term < TERMS - 1 -> term++; reached[term] = 1; heard[0] = false; heard[1] = false }
    :: atomic {
           saved && restores > 0 && term < TERMS - 1 ->
           restores--;
           there = saved_there; rec_primary = saved_primary; rec_backup = saved_backup; rec_epoch = saved_epoch;
           for (i : 0 .. TERMS - 1) { reached[i] = saved_reached[i] };
           i = 0;
           term++;
           reached[term] = 1;
           heard[0] = false;
           heard[1] = false
       }

    /* Servers. The last one that has all does not lose its memory. */
    :: atomic {
           deaths > 0 ->
           i = 0;
           if :: true :: i = 1 fi;
           if
           :: alive[i] -> deaths--; alive[i] = false; heard[i] = false; primary[i] = false; backed[i] = false
           :: alive[i] && (deleted || !has[i] || (has[OTHER(i)] && (data[i] & ~data[OTHER(i)]) == 0)) ->
               deaths--; alive[i] = false; heard[i] = false; forget(i)
           :: else
           fi;
           i = 0
       }
    :: atomic { !alive[0] -> alive[0] = true }
    :: atomic { !alive[1] -> alive[1] = true }
    :: atomic { heard[0] && alive[0] -> heard[0] = false } /* its lease runs out */
    :: atomic { heard[1] && alive[1] -> heard[1] = false }
    od
}

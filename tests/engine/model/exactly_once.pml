/* A remote client's additions under crashes of the daemon, cuts of the connection and resumption, beside a local client that adds
 * to the same chunk. The steps are those of csrc/memory/journal.c, gate.c, chunk.c, link.c and resume.c; a crash may come between any two.
 *
 * The chunk has two blocks, whose contents differ: a block put back in the other's place must not go unseen. The remote client
 * adds 1 to each, the local one 16; while a block is half added it holds HALF more. What the processes share (the segment and the journal in tmpfs) survives a crash; the daemon's own state does not.
 * docs/decisions/0008 explains the mechanism. Each planted fault (-D...) must be found: run_models.py. */
#define OPS 2
#define HALF 64
#define APART 32                   /* by so much the second block is ahead of the first */
#ifndef CRASHES
#define CRASHES 2
#endif
#ifndef CUTS
#define CUTS 1
#endif

byte block[2] = { 0, APART };        /* segment: the data; the second begins with APART */
bool odd;                          /*          the chunk's sequence count */
bool mark;                         /*          the chunk belongs to the journal's slot */
byte watermark;                    /*          the lane's record */
bool evicted;                      /*          a record was evicted once */
bool in_slot, dirty; byte at;       /* journal: the progress word; written in one step */
byte undo;
byte slot_sequence;

byte locked;                       /* 0: free, 1: the daemon, 2: the local client */
bool owner_dead;

byte crashes = CRASHES, cuts = CUTS;
/* A record is evicted, or the network says a frame twice; not both: TCP doubles nothing, and that the second of two equal frames is
 * known when the record is gone is not promised (it does not say that it is a repetition). */
bool evictions = true;
byte life;                         /* of the daemon: a connection to an earlier one is broken */
bool executing;                    /* the daemon is at a change: HELLO waits for its end */
bool recovering;
byte newest;                       /* the connection that speaks for the lane */
byte conn = 1; byte conn_run;      /* the client's connection, and to which life */
bool conn_cut;

byte acked, unknown, refused_forever; /* ghosts: additions acknowledged; of unknown outcome; declared never to be applied */
byte local_done;
bool over;

chan to_daemon = [4] of { byte, byte, byte, bool }; /* run, connection, sequence, sent before */
chan to_client = [4] of { byte, byte, byte, bool }; /* run, connection, sequence, refused */

#define CRASH_HERE if :: crashes > 0 -> crashes--; goto died :: true fi

inline add_block(b, amount)
{
    block[b] = block[b] + HALF;
    CRASH_HERE;
    block[b] = block[b] - HALF + amount;
}

inline run_blocks()
{
    do
    :: at < 2 ->
#ifdef LATE_UNDO
        dirty = true;
        CRASH_HERE;
        block[at] = block[at] + HALF;
        CRASH_HERE;
        undo = block[at];
        CRASH_HERE;
        block[at] = block[at] - HALF + 1;
#else
        undo = block[at];
        CRASH_HERE;
        dirty = true;
        CRASH_HERE;
        add_block(at, 1);
#endif
        CRASH_HERE;
#ifdef TWO_WORDS
        at = at + 1;
        CRASH_HERE;
        dirty = false;
#else
        atomic { at = at + 1; dirty = false }
#endif
        CRASH_HERE
    :: else -> break
    od
}

inline finish()
{
    CRASH_HERE;
#ifndef EARLY_WATERMARK
    watermark = slot_sequence;
#endif
    CRASH_HERE;
    odd = false;
    CRASH_HERE;
    mark = false;
    CRASH_HERE
}

active proctype daemon()
{
    byte r, c, s; bool again;
restart:
    recovering = true;
    if
    :: in_slot && mark ->
        odd = true;
        CRASH_HERE;
        if
        :: dirty && at < 2 -> block[at] = undo; CRASH_HERE
        :: else
        fi;
        run_blocks();
        finish()
    :: else
    fi;
    atomic { in_slot = false; dirty = false; at = 0; recovering = false }

    do
    :: over -> goto done
    :: atomic { to_daemon ? r, c, s, again -> executing = true };
        if
        :: r != life
        :: r == life ->
            if
#ifndef NO_FENCE
            :: c < newest
#endif
            :: evicted && again && watermark == 0
#ifndef EVICTED_IS_NEW
                -> to_client ! life, c, s, true
#else
                -> goto apply
#endif
            :: else ->
                if
#ifndef DOUBLES_APPLIED
                :: s <= watermark && !(evicted && again && watermark == 0) -> to_client ! life, c, s, false
#endif
                :: else ->
apply:
#ifdef EARLY_WATERMARK
                    watermark = s;
                    CRASH_HERE;
#endif
                    slot_sequence = s;
                    /* never blocks: it would park the request; here it just waits for its turn */
                    atomic { (locked == 0 || (locked != 0 && owner_dead)) -> locked = 1; owner_dead = false };
                    CRASH_HERE;
                    atomic { in_slot = true; dirty = false; at = 0 };
                    CRASH_HERE;
                    mark = true;
                    CRASH_HERE;
                    odd = true;
                    CRASH_HERE;
                    run_blocks();
                    finish();
                    locked = 0;
                    CRASH_HERE;
                    in_slot = false;
                    CRASH_HERE;
                    to_client ! life, c, s, false
                fi
            fi
        fi;
        CRASH_HERE;
        atomic { r = 0; c = 0; s = 0; again = false; executing = false }
    od;
died:
    atomic {
        life++;
        executing = false;
        recovering = true; /* it serves nobody before that is done */
        if :: locked == 1 -> owner_dead = true :: else fi;
        r = 0; c = 0; s = 0; again = false
    };
    goto restart;
done:
    skip
}

/* Cuts are the network's; a broken connection to a dead life is found at the next attempt. */
active proctype remote()
{
    byte op = 1, s, r, c; bool refused, first = true, restarted;
    conn_run = life;
    do
    :: op > OPS -> break
    :: else ->
        s = op;
#ifdef SEQUENCES_RESTART
        if :: restarted -> s = 1 :: else fi;
#endif
        first = true;
send:
        if
        :: conn_run == life && !conn_cut ->
            to_daemon ! conn_run, conn, s, !first;
            if
            :: atomic { evictions -> evictions = false }; to_daemon ! conn_run, conn, s, !first
            :: true
            fi
        :: conn_run != life || conn_cut -> goto resume
        fi;
        first = false;
wait:
        do
        :: to_client ? r, c, s, refused ->
            if
            :: r == conn_run && c == conn && !conn_cut && s == op -> break
#ifdef SEQUENCES_RESTART
            :: r == conn_run && c == conn && !conn_cut && restarted -> break
#endif
            :: else -> s = op
            fi
        :: conn_run != life || conn_cut -> goto resume
        :: cuts > 0 -> cuts--; conn_cut = true
        od;
        if :: refused -> unknown++ :: else -> acked++ fi;
        op++;
        goto next;
resume:
        atomic { !executing && !recovering -> conn++; conn_run = life; conn_cut = false; newest = conn; restarted = true };
        /* WATERMARK, on the new connection: one answer */
        atomic {
            if
            :: conn_run != life -> goto resume
            :: conn_run == life && evicted && watermark == 0 && !first -> goto send
            :: conn_run == life && !(evicted && watermark == 0 && !first) ->
                if
                :: watermark >= s -> acked++; op++
                :: watermark < s && !first -> /* its caller may have left: then it is not sent again, and was told so */
                    if :: refused_forever++; op++ :: goto send fi
                :: watermark < s && first -> goto send
                fi
            fi
        };
next:
        refused = false
    od;
    over = true
}

active proctype neighbour()
{
    byte tries = 3;
    do
    :: local_done == 1 || over -> break
    :: else ->
        atomic {
            if
            :: locked == 0 -> locked = 2
            :: locked == 1 && owner_dead ->
                locked = 2;
                owner_dead = false;
                if :: mark :: else -> odd = false fi
            fi
        };
        if
#ifdef MARK_IGNORED
        :: false
#else
        :: mark -> locked = 0 /* left by a daemon that was killed: wait for the next one */
#endif
        :: else ->
            odd = true;
            block[0] = block[0] + HALF;
            block[0] = block[0] - HALF + 16;
            block[1] = block[1] + 16;
            odd = false;
            locked = 0;
            local_done++
        fi
    od
}

/* An older record makes room for others once: what it said is forgotten, and that it was is known. Not while it is used. */
active proctype eviction()
{
    if
    :: atomic { evictions && !executing && !recovering && !in_slot && watermark > 0 -> evicted = true; watermark = 0; evictions = false }
    :: over
    fi
}

#define TORN (block[1] != block[0] + APART || block[0] >= HALF)

/* No reader sees half of an addition: it looks only while the count is even. */
active proctype reader()
{
    do
    :: over -> break
    :: atomic { !odd -> assert(!TORN) }
    od
}

/* At the end every acknowledged addition is there once, in both blocks; one of unknown outcome at most once. */
active proctype judge()
{
    byte remote_part;
    atomic {
        over && !executing && !recovering && !in_slot && locked != 2 ->
        remote_part = block[0] % 16;
        assert(!TORN);
        assert(remote_part >= acked);
        assert(remote_part <= acked + unknown)
    }
}

/* The log of a state with deltas: a trainer writes one delta after the other into a ring, and publishes each by its number. The mirror A has a ring
 * of its own: its relay brings one delta after the other, and publishes each, too. Where some are gone meanwhile, it first publishes the number of a
 * whole state, and goes on behind that. The relay of B takes deltas from A's ring as they come, or from the source. The trainer and A's relay may be
 * killed between any two stores, and a reader may read at any moment, how late so ever. The steps are those of smb/torch/publishing/deltas.py,
 * smb/relay/publication_log.py and mirror.py.
 *
 * A place of a ring holds the number of the generation whose delta it is, or DAMAGED while it is written. What is checked: a delta that a
 * reader or a relay takes for one of a generation is that one, and of those that a mirror shows every delta is there.
 * (In the program the sum over a state would find another one; it would cost a whole state each time.)
 * Each planted fault (-D...) must be found: run_models.py. Two halves: -DFORWARD has B's relay in place of the reader. */
#ifndef LAST
#define LAST 6          /* generations */
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#define REACH 2         /* so many deltas are in reach of each generation */
#ifdef LITTLE_SLACK
#define PLACES 3
#else
#define PLACES 4        /* in a ring: as many, and two that are written ahead */
#endif
#define DAMAGED 15

byte s_ring[PLACES], s_head;                       /* the source: deltas; the generation published last */
byte a_ring[PLACES], a_head, a_first = 1;          /* the mirror; its first entry behind the last gap */
byte word_generation;                              /* beside A's ring: the delta that arrives */
bool word_whole;                                   /* it has arrived */

byte crashes = CRASHES, deaths = DEATHS;

#define FIRST_OF(head) (head >= REACH -> head - REACH + 1 : 1)
#define KILLED(label) if :: crashes > 0 -> crashes--; goto label :: true fi

/* Whether a delta that was in reach of some generation is still there: it is in reach now, or two have not been published since. */
#define HELD_BY_S(g, head) (s_head < head + 2 || g >= FIRST_OF(s_head))
#define IN_A(g) (g <= a_head && g >= a_first && g >= FIRST_OF(a_head))
#define HELD_BY_A(g, head) (a_head < head + 2 || IN_A(g))

proctype trainer()
{
    byte next;
again:
    do
    :: s_head == LAST -> break
    :: else ->
        next = s_head + 1;
        s_ring[next % PLACES] = DAMAGED;
        if :: deaths > 0 -> deaths--; goto again :: true fi; /* the next trainer begins with the same number */
        s_ring[next % PLACES] = next;
        if :: deaths > 0 -> deaths--; goto again :: true fi;
        s_head = next
    od
}

proctype relay_a()
{
    byte head, g, value;
start:
    atomic { head = 0; g = 0; value = 0 };
    do
    :: a_head == LAST -> break
    :: s_head > a_head ->
        atomic { head = s_head; g = a_head + 1 };
        if
        :: g >= FIRST_OF(head)
        :: else -> /* some are gone */
            g = FIRST_OF(head);
#ifndef GAP_UNSAID
            atomic {
#ifndef GAP_FORGOTTEN
                a_first = g;
#endif
                a_head = g - 1
            };
            KILLED(start)
#endif
        fi;
#ifdef COMMITTED_EARLY
        atomic { if :: a_first > g || a_head < g - 1 -> a_first = g :: else fi; a_head = g };
#endif
#ifndef WORDS_LATE
        atomic { word_generation = g; word_whole = false };
        KILLED(start);
#endif
        value = s_ring[g % PLACES];
#ifndef SOURCE_NOT_LOOKED_AT
        if :: !HELD_BY_S(g, head) -> goto start :: else fi;
#endif
        assert(value == g);
        /* The same bytes once more are no damage: it was killed before it published them. */
        if :: a_ring[g % PLACES] != g -> a_ring[g % PLACES] = DAMAGED :: else fi;
        KILLED(start);
        a_ring[g % PLACES] = value;
        KILLED(start);
        atomic { word_generation = g; word_whole = true; value = 0 };
        KILLED(start);
        atomic {
#ifdef GAP_UNSAID
            if :: a_head < g - 1 -> a_first = g :: else fi;
#endif
            a_head = g;
            for (g : FIRST_OF(a_head) .. a_head) {
                assert(a_ring[g % PLACES] == g || g < a_first)
            };
            g = 0; head = 0
        }
    od
}

/* The relay of B: each delta from A's ring, as it arrives or later, or from the source. */
proctype relay_b()
{
    byte head, g, value;
    do
    :: head == LAST -> break
    :: s_head > head ->
start:
        atomic { head = s_head; g = FIRST_OF(head) };
        do
        :: g > head -> break
        :: else ->
            if
            :: (word_generation == g && word_whole) || IN_A(g) ->
                value = a_ring[g % PLACES];
#ifndef NOT_LOOKED_AT
                if :: atomic { (word_generation == g && word_whole) || IN_A(g) -> skip } :: else -> goto start fi;
#endif
                assert(value == g)
            :: g >= FIRST_OF(s_head) -> skip /* from the source: as A */
            :: !(word_generation == g && word_whole) && !IN_A(g) && g < FIRST_OF(s_head) -> goto start
            fi;
            atomic { g++; value = 0 }
        od
    od
}

/* A reader at A: the deltas that are in reach of A's generation. */
proctype reader()
{
    byte head, g, value;
    do
    :: a_head == LAST -> break
    :: atomic { a_head > 0 && a_head < LAST -> head = a_head; g = (FIRST_OF(head) > a_first -> FIRST_OF(head) : a_first) };
        do
        :: g > head -> break
        :: else ->
            value = a_ring[g % PLACES];
#ifdef NOT_LOOKED_AT
            assert(value == g);
#endif
            if
            :: atomic { HELD_BY_A(g, head) -> assert(value == g) }
            :: else /* it reads the entries anew */
            fi;
            atomic { g++; value = 0 }
        od
    od
}

init
{
    atomic {
        run trainer(); run relay_a();
#ifdef FORWARD
        run relay_b()
#else
        run reader()
#endif
    }
}

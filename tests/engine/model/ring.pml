/* A state with deltas: a trainer writes them into a ring, and what describes a generation names the last ones. The mirror A has a ring of its
 * own, filled by its relay before it shows a generation; the relay of B takes deltas from A's ring as they come, or from the source. The
 * trainer and A's relay may be killed between any two stores, and a reader may read at any moment, how late so ever. The steps are those of
 * smb/torch/deltas.py, smb/relay/ring.py, mirror.py and generations.py.
 *
 * A place of a ring holds the number of the generation whose delta it is, or DAMAGED while it is written. What is checked: a delta that a
 * reader or a relay takes for one of a generation is that one, and that of a generation which a mirror shows every delta is there.
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
#define NAMED 2         /* deltas by each generation */
#ifdef LITTLE_SLACK
#define PLACES 3
#else
#define PLACES 4        /* in a ring: as many, and two that are written ahead */
#endif
#define DAMAGED 15

byte s_ring[PLACES], s_head;                       /* the source: deltas; the generation published last */
byte a_ring[PLACES], a_head;
byte word_generation, word_oldest;                 /* beside A's ring, one chunk: the delta that arrives, the oldest that stays */
bool word_whole;                                   /* it has arrived */

byte crashes = CRASHES, deaths = DEATHS;

#define FIRST_OF(head) (head >= NAMED -> head - NAMED + 1 : 1)
#define KILLED(label) if :: crashes > 0 -> crashes--; goto label :: true fi

/* Whether A's ring has the delta of a generation, by the words. */
#define IN_A(g) (word_oldest <= g && (g < word_generation || (g == word_generation && word_whole)))
#ifdef OLD_RULE
#define STAYED_IN_A(g, head) (a_head < head + 2)
#else
#define STAYED_IN_A(g, head) IN_A(g)
#endif
/* Whether a delta that some generation named is still in the source: it is named now, or two have not been published since. */
#define STAYED_IN_S(g, head) (s_head < head + 2 || g >= FIRST_OF(s_head))

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
    byte head, g, value, oldest;
start:
    atomic { head = 0; g = 0; value = 0; oldest = 0 };
    do
    :: a_head == LAST -> break
    :: s_head > a_head ->
        atomic {
            head = s_head;
            g = (word_whole -> word_generation + 1 : word_generation);  /* the first that is not there */
#ifdef HALF_TAKEN_FOR_WHOLE
            g = word_generation + 1;
#endif
            if
            :: g == 0 -> g = 1
            :: else
            fi;
            if
            :: FIRST_OF(head) < g && IN_A(g - 1) -> /* it goes on */
                oldest = (word_oldest > FIRST_OF(head) -> word_oldest : FIRST_OF(head))
            :: else -> /* new, or it has lost some */
                g = FIRST_OF(head);
                oldest = g
            fi;
#ifdef OLDEST_STAYS
            oldest = 1
#endif
        };
        do
        :: g > head -> break
#ifdef COMMITTED_EARLY
        :: true -> break
#endif
        :: else ->
#ifndef OLDEST_LATE
            atomic { word_generation = g; word_oldest = oldest; word_whole = false };
            KILLED(start);
#endif
            value = s_ring[g % PLACES];
#ifndef SOURCE_NOT_LOOKED_AT
            if :: !STAYED_IN_S(g, head) -> goto start :: else fi;
#endif
            assert(value == g);
            a_ring[g % PLACES] = DAMAGED;
            KILLED(start);
            a_ring[g % PLACES] = value;
            KILLED(start);
            atomic { word_generation = g; word_oldest = oldest; word_whole = true; value = 0; g++ }
        od;
        atomic {
            for (g : FIRST_OF(head) .. head) {
                assert(a_ring[g % PLACES] == g || g < word_oldest)
            };
            a_head = head;
            g = 0; head = 0; oldest = 0
        }
    od
}

/* The relay of B: each delta from A's ring, or from the source. */
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
            :: IN_A(g) ->
                value = a_ring[g % PLACES];
#ifndef NOT_LOOKED_AT
                if :: !(word_oldest <= g) -> goto start :: else fi;
#endif
                assert(value == g)
            :: g >= FIRST_OF(s_head) -> skip /* from the source: as A */
            :: !IN_A(g) && g < FIRST_OF(s_head) -> goto start
            fi;
            atomic { g++; value = 0 }
        od
    od
}

/* A reader at A: the deltas that A's generation names. Those that it can't have from there it takes from the source. */
proctype reader()
{
    byte head, g, value;
    do
    :: a_head == LAST -> break
    :: atomic { a_head > 0 && a_head < LAST -> head = a_head; g = FIRST_OF(head) };
        do
        :: g > head -> break
        :: else ->
            value = a_ring[g % PLACES];
            if
            :: atomic { STAYED_IN_A(g, head) -> assert(value == g) }
            :: else ->
                value = s_ring[g % PLACES];
                if
                :: atomic { s_head < head + 2 -> assert(value == g) }
                :: else /* it begins anew with a later generation */
                fi
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

/* A published buffer, its mirror A, which is filled from it, and a second mirror B, which takes pieces from A as they come or from the
 * source. A publisher and A's relay may be killed between any two stores. Readers of A, and one that holds a pin at the source. The steps are
 * those of csrc/sync/sync_version.c, smb/relay/mirror.py and filler.py.
 *
 * A piece holds the number of the version that it is of. What is checked:
 *   a piece that a relay takes for one of a version is that, and a version that a reader takes for one is all of it;
 *   what a pin holds stays, until the publisher says that it will not wait;
 *   with three copies one held version delays no publisher.
 * Each planted fault (-D...) must be found: run_models.py. Two halves, as all of it has too many states: -DFORWARD from A on, where the source
 * is read in one step, and without it up to A. */
#ifndef VERSIONS
#define VERSIONS 4
#endif
#ifndef CRASHES
#define CRASHES 1
#endif
#ifndef DEATHS
#define DEATHS 1
#endif
#ifndef COPIES
#define COPIES 3        /* of the source, or 2; a mirror has two here */
#endif
#define PIECES 2
#define BEGUN 8         /* and not a version: somebody writes there */
#define NONE 9

byte s_copies[3], s_data[3 * PIECES], s_version;     /* the source: which version lies where */
byte a_copies[2], a_data[2 * PIECES], a_version;
byte b_version;
byte word_version, word_copy, word_bits;                       /* beside A: what has arrived; one chunk */
byte pinned[2];                                                /* by the relay of A, by a reader */

byte crashes = CRASHES, deaths = DEATHS;

#define KILLED(label) if :: crashes > 0 -> crashes--; goto label :: true fi

#define FIND_S(v) (s_copies[0] == v -> 0 : (s_copies[1] == v -> 1 : (s_copies[2] == v -> 2 : NONE)))
#define FIND_A(v) (a_copies[0] == v -> 0 : (a_copies[1] == v -> 1 : NONE))
#ifdef PIN_IGNORED
#define IS_PINNED(c) false
#else
#define IS_PINNED(c) (s_copies[c] > 0 && (s_copies[c] == pinned[0] || s_copies[c] == pinned[1]))
#endif
#define MAY_WRITE(c) (s_copies[c] != s_version && !IS_PINNED(c))

/* Of a mirror: the copy that somebody died in, else the one that is not the latest. */
#define OTHER(copies, version) (copies[0] == BEGUN -> 0 : (copies[1] == BEGUN -> 1 : (copies[0] == version -> 1 : 0)))

proctype publisher()
{
    byte copy, next, each, piece;
again:
    do
    :: s_version == VERSIONS -> break
    :: else ->
        atomic {
            next = s_version + 1;
            copy = NONE;
            if
            :: s_copies[0] == BEGUN -> copy = 0
            :: s_copies[1] == BEGUN -> copy = 1
            :: s_copies[2] == BEGUN -> copy = 2
            :: else ->
                for (each : 0 .. COPIES - 1) {
                    if
                    :: MAY_WRITE(each) && (copy == NONE || s_copies[each] < s_copies[copy]) -> copy = each
                    :: else
                    fi
                };
                /* one of two held versions may be the latest, and then there is a copy, too */
                assert(COPIES == 2 || copy != NONE || (pinned[0] > 0 && pinned[1] > 0 && pinned[0] != pinned[1]));
                if
                :: copy == NONE -> /* waited as long as it would: it goes over the oldest */
                    for (each : 0 .. COPIES - 1) {
                        if
                        :: s_copies[each] != s_version && (copy == NONE || s_copies[each] < s_copies[copy]) -> copy = each
                        :: else
                        fi
                    };
                    if :: pinned[0] == s_copies[copy] -> pinned[0] = 0 :: else fi;
                    if :: pinned[1] == s_copies[copy] -> pinned[1] = 0 :: else fi
                :: else
                fi
            fi;
            s_copies[copy] = BEGUN
        };
#ifndef FORWARD
        for (piece : 0 .. PIECES - 1) {
            if :: deaths > 0 -> deaths--; goto again :: true fi; /* the next publisher begins */
            s_data[copy * PIECES + piece] = next
        };
#endif
        atomic { s_copies[copy] = next; s_version = next }
    od
}

/* The relay of A: all pieces from the source, in either order. */
proctype relay_a()
{
    byte version, copy, from, value, piece, done;
start:
    atomic { pinned[0] = 0; version = 0; copy = 0; from = 0; value = 0; piece = 0; done = 0 }; /* a kill: its pin runs out */
    do
    :: a_version == VERSIONS -> break
    :: s_version > a_version ->
        atomic { version = s_version; pinned[0] = version };
        atomic { copy = OTHER(a_copies, a_version); a_copies[copy] = BEGUN };
#ifndef WORDS_LATE
        atomic { word_version = version; word_copy = copy; word_bits = 0 };
#endif
        KILLED(start);
        done = 0;
        do
        :: done == 3 -> break
        :: else ->
            if :: !(done & 1) -> piece = 0 :: !(done & 2) -> piece = 1 fi;
#ifdef FORWARD
            if :: FIND_S(version) == NONE -> goto start :: else -> value = version fi;
#else
            from = FIND_S(version);
            if :: from == NONE -> goto start :: else fi;
            value = s_data[from * PIECES + piece];
#ifndef SOURCE_NOT_LOOKED_AT
            if :: FIND_S(version) != from -> goto start :: else fi; /* overwritten on its way */
#endif
            from = 0;
            assert(value == version);
#endif
#ifdef BIT_EARLY
            word_bits = word_bits | (1 << piece);
#endif
            a_data[copy * PIECES + piece] = value;
            KILLED(start);
#ifdef WORDS_LATE
            atomic { word_version = version; word_copy = copy; word_bits = done };
#endif
#ifndef BIT_EARLY
            word_bits = word_bits | (1 << piece);
#endif
            atomic { done = done | (1 << piece); value = 0; piece = 0 };
#ifdef COMMITTED_EARLY
            break
#endif
        od;
        KILLED(start);
        atomic { a_copies[copy] = version; a_version = version };
        pinned[0] = 0
    od
}

/* The relay of B: each piece from A if it is there, or from the source. What it does with them is as in A. */
proctype relay_b()
{
    byte version, from, value, piece;
start:
    atomic { version = 0; from = 0; value = 0; piece = 0 };
    do
    :: b_version == VERSIONS -> break
    :: s_version > b_version ->
        version = s_version;
        do
        :: piece == PIECES -> break
        :: else ->
            if
            :: atomic { word_version == version && (word_bits & (1 << piece)) -> from = word_copy }
            :: atomic { word_version > version && FIND_A(version) != NONE -> from = FIND_A(version) }
            :: atomic { FIND_S(version) != NONE -> value = version; goto came } /* the plan, or A gives nothing */
            :: atomic { FIND_S(version) == NONE && FIND_A(version) == NONE -> goto start }
            fi;
            value = a_data[from * PIECES + piece];
#ifndef NOT_LOOKED_AT
            if
            :: atomic { word_version == version && word_copy == from -> skip }
            :: else ->
                if
                :: FIND_A(version) == from
                :: else -> goto start /* A went on: dropped */
                fi
            fi;
#endif
came:
            assert(value == version);
            atomic { piece++; value = 0; from = 0 }
        od;
        atomic { b_version = version; version = 0; piece = 0 }
    od
}

proctype reader()
{
    byte version, copy, first, second;
    do
    :: a_version == VERSIONS -> break
    :: atomic { a_version > 0 && a_version < VERSIONS -> version = a_version; copy = FIND_A(version) };
        first = a_data[copy * PIECES];
        second = a_data[copy * PIECES + 1];
        if
#ifdef READER_LOOKS_ONCE
        :: atomic { true -> assert(first == version && second == version) }
#endif
        :: atomic { FIND_A(version) == copy -> assert(first == version && second == version) }
        :: else
        fi;
        atomic { version = 0; copy = 0; first = 0; second = 0 }
    od
}

/* A reader that holds a version of the source, once. */
proctype holder()
{
    byte version, copy, first, second;
    atomic { s_version > 0 -> version = s_version; pinned[1] = version; copy = FIND_S(version) };
    first = s_data[copy * PIECES];
    second = s_data[copy * PIECES + 1];
    atomic {
        if
        :: pinned[1] == version -> assert(FIND_S(version) == copy && first == version && second == version)
        :: else
        fi
    };
    pinned[1] = 0
}

init
{
    atomic {
        s_version = 1;
        s_copies[COPIES - 1] = 1;
        s_data[COPIES * PIECES - 2] = 1;
        s_data[COPIES * PIECES - 1] = 1;
        run publisher();
        run relay_a();
#ifdef FORWARD
        run relay_b()
#else
        run holder();
        run reader()
#endif
    }
}

/* A barrier of three parties that arrive, perhaps repeatedly because an answer was lost, wait, and may die; its home may be killed
 * at any store. Nobody leaves a round before all of it arrived; a death breaks the round for all that are in it. The steps are
 * those of csrc/sync/sync_barrier.c. Each planted fault (-D...) must be found. */
#define PARTIES 3
#define ROUNDS 2
#ifndef CRASHES
#define CRASHES 2
#endif

byte round, arrived;               /* persistent: one word */
byte seats[6];                     /* persistent: (round mod 2) * PARTIES + index: who, with which request */
bool broken[4];                    /* persistent: by round */

byte crashes = CRASHES, deaths = 1;
byte came[4];                      /* ghosts: which parties arrived in a round; how many left it as complete */
byte gone[4];
bool dead[4];

/* The daemon's part of ARRIVE. `mine` gets the round, or NONE where the daemon was killed before it answered. */
#define NONE 9

inline arrive(who, request)
{
    atomic {
        if /* repeated: in the round under way, or in the one before */
#ifndef SEATS_FORGOTTEN
        :: arrived > 0 && seats[(round % 2) * PARTIES] == who * 4 + request -> mine = round
        :: arrived > 1 && seats[(round % 2) * PARTIES + 1] == who * 4 + request -> mine = round
        :: arrived > 2 && seats[(round % 2) * PARTIES + 2] == who * 4 + request -> mine = round
        :: round > 0 && seats[((round + 1) % 2) * PARTIES] == who * 4 + request -> mine = round - 1
        :: round > 0 && seats[((round + 1) % 2) * PARTIES + 1] == who * 4 + request -> mine = round - 1
        :: round > 0 && seats[((round + 1) % 2) * PARTIES + 2] == who * 4 + request -> mine = round - 1
#endif
        :: else ->
            seats[(round % 2) * PARTIES + arrived] = who * 4 + request;
            if
            :: crashes > 0 -> crashes--; mine = NONE /* killed before the word counts it */
            :: true ->
                mine = round;
                came[round] = came[round] | (1 << who);
                if
                :: arrived + 1 == PARTIES -> broken[round + 1] = false; round++; arrived = 0
                :: else -> arrived++
                fi;
                if
                :: crashes > 0 -> crashes--; mine = NONE /* killed after: the answer is lost */
                :: true
                fi
            fi
        fi
    }
}

proctype party(byte who)
{
    byte request = 1, mine;
    do
    :: request > ROUNDS -> break
    :: else ->
        mine = NONE;
        do
        :: mine != NONE -> break
        :: mine == NONE -> arrive(who, request)
        od;
        if
        :: deaths > 0 -> atomic { deaths--; dead[who] = true }; goto done
        :: true
        fi;
        /* AWAIT: deferred until the round is over */
#ifdef LEAVES_EARLY
        if :: true :: round > mine fi;
#else
        round > mine || timeout;
        if :: round <= mine -> goto done :: else fi; /* nobody is left to come: its own timeout breaks the round */
#endif
        atomic {
            if
            :: broken[mine] -> goto done /* BrokenBarrierError */
            :: else -> gone[mine]++; assert(came[mine] == 14) /* all of 1, 2 and 3 */
            fi
        };
        request++
    od;
done:
    skip
}

#define SEATED(who) (arrived > 0 && seats[(round % 2) * PARTIES] / 4 == who) || (arrived > 1 && seats[(round % 2) * PARTIES + 1] / 4 == who)

/* A party that is gone breaks the round in which it has a seat. */
active proctype absence()
{
    byte who;
    do
    :: atomic { (dead[1] || dead[2] || dead[3]) ->
           who = (dead[1] -> 1 : (dead[2] -> 2 : 3));
           if
           :: SEATED(who) ->
#ifndef NOT_BROKEN
               broken[round] = true;
#endif
               round++;
               arrived = 0
           :: else
           fi
       };
       break
    :: timeout -> break
    od
}

init
{
    atomic { run party(1); run party(2); run party(3) }
}

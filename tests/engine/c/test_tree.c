/* The ordered set: compared with a plain array, and how long its operations take. */
#include <stdlib.h>
#include <string.h>

#include "base/tree.h"
#include "check.h"
#include "random.h"

struct thing {
    struct tree_node node;
    uint64_t high, low;
    bool in;
};

static int by_key(const void *left, const void *right)
{
    const struct thing *const *a = left, *const *b = right;
    if ((*a)->high != (*b)->high)
        return (*a)->high < (*b)->high ? -1 : 1;
    return (*a)->low<(*b)->low ? -1 : (*a)->low>(*b)->low;
}

static struct thing *owner(struct tree_node *node)
{
    return TREE_OWNER(node, struct thing, node);
}

static void check_whole(const struct tree *tree, struct thing *things, int count)
{
    struct thing **sorted = malloc((size_t)count * sizeof(struct thing *));
    int in = 0;
    for (int i = 0; i < count; i++)
        if (things[i].in)
            sorted[in++] = &things[i];
    qsort(sorted, (size_t)in, sizeof *sorted, by_key);
    CHECK_EQ(tree->count, in);
    int seen = 0;
    for (struct tree_node *node = tree_first(tree); node; node = tree_next(node), seen++)
        CHECK(seen < in && node->key[0] == sorted[seen]->high &&
              node->key[1] == sorted[seen]->low && owner(node)->in);
    CHECK_EQ(seen, in);
    for (uint64_t high = 0; high < 5; high++) {
        for (uint64_t low = 0; low < 9; low++) {
            int at = 0;
            while (at < in &&
                   (sorted[at]->high < high || (sorted[at]->high == high && sorted[at]->low < low)))
                at++;
            struct thing *from = owner(tree_from(tree, high, low)),
                         *found = owner(tree_find(tree, high, low));
            bool is_there = at < in && sorted[at]->high == high && sorted[at]->low == low;
            CHECK_EQ(from != NULL, at < in);
            CHECK(!from || (from->high == sorted[at]->high && from->low == sorted[at]->low));
            CHECK(is_there ? found && found->high == high && found->low == low : !found);
        }
    }
    free(sorted);
}

/* Any order of additions and removals, with equal keys among them, leaves what a sorted array
 * has. */
static void like_a_sorted_array(void)
{
    enum { MANY = 60, STEPS = 4000 };
    struct thing things[MANY] = {0};
    struct tree tree = {0};
    struct random random = random_make(11);
    uint64_t weights = 5;
    CHECK(!tree_first(&tree) && !tree_from(&tree, 0, 0) && !tree_find(&tree, 0, 0) && !owner(NULL));
    for (int step = 0; step < STEPS; step++) {
        struct thing *thing = &things[random_below(&random, MANY)];
        if (thing->in) {
            tree_take(&tree, &thing->node);
        } else {
            thing->high = random_below(&random, 4);
            thing->low = random_below(&random, 8);
            tree_add(&tree, &thing->node, thing->high, thing->low, &weights);
        }
        thing->in = !thing->in;
        if (step % 10 == 0)
            check_whole(&tree, things, MANY);
    }
}

static int depth_of(const struct tree_node *node)
{
    int depth = 0;
    for (; node; node = node->parent)
        depth++;
    return depth;
}

/* No order of keys makes it deep. */
static void shallow(void)
{
    enum { MANY = 100000 };
    struct thing *things = calloc(MANY, sizeof *things);
    for (int order = 0; order < 4; order++) { /* ascending, descending, all equal, from both ends */
        struct tree tree = {0};
        uint64_t weights = tree_random();
        for (uint64_t i = 0; i < MANY; i++) {
            uint64_t keys[] = {i, MANY - i, 7, i % 2 ? i : 2 * MANY - i};
            tree_add(&tree, &things[i].node, keys[order], 0, &weights);
        }
        int deepest = 0;
        for (int i = 0; i < MANY; i++) {
            int depth = depth_of(&things[i].node);
            deepest = depth > deepest ? depth : deepest;
        }
        CHECK(deepest < 80); /* about 2 ln n on average, and 40 or so at the deepest */
        for (int i = 0; i < MANY; i++)
            tree_take(&tree, tree_first(&tree));
        CHECK(tree.count == 0 && !tree.root);
    }
    free(things);
}

int main(void)
{
    static const struct test tests[] = {TEST(like_a_sorted_array), TEST(shallow)};
    return RUN_TESTS(tests);
}

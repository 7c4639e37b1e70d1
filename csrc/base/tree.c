#include "base/tree.h"

#include <stdbool.h>
#include <sys/random.h>

#include "base/assert.h"

uint64_t tree_random(void)
{
    uint64_t drawn = 0;
    /* without entropy the weights are predictable: a hostile client could then only slow the tree
     * down */
    (void)!getrandom(&drawn, sizeof drawn, 0);
    return drawn;
}

/* splitmix64 */
static uint64_t next_weight(uint64_t *weights)
{
    uint64_t mixed = *weights += 0x9E3779B97F4A7C15U;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9U;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBU;
    return mixed ^ mixed >> 31;
}

static bool is_less(const uint64_t key[2], uint64_t high, uint64_t low)
{
    return key[0] != high ? key[0] < high : key[1] < low;
}

static struct tree_node **link_to(struct tree *tree, const struct tree_node *node)
{
    if (!node->parent)
        return &tree->root;
    return node->parent->left == node ? &node->parent->left : &node->parent->right;
}

/* Rotates `node` above its parent. */
static void rotate_up(struct tree *tree, struct tree_node *node)
{
    struct tree_node *parent = node->parent;
    bool is_left = parent->left == node;
    struct tree_node **between = is_left ? &node->right : &node->left;
    *link_to(tree, parent) = node;
    node->parent = parent->parent;
    *(is_left ? &parent->left : &parent->right) = *between;
    if (*between)
        (*between)->parent = parent;
    *between = parent;
    parent->parent = node;
}

void tree_add(struct tree *tree, struct tree_node *node, uint64_t high, uint64_t low,
              uint64_t *weights)
{
    struct tree_node *parent = NULL, **at = &tree->root;
    while (*at) {
        parent = *at;
        at = is_less((uint64_t[]){high, low}, parent->key[0], parent->key[1]) ? &parent->left
                                                                              : &parent->right;
    }
    *node = (struct tree_node){
        .parent = parent, .key = {high, low}, .weight = next_weight(weights)};
    *at = node;
    tree->count++;
    while (node->parent && node->weight < node->parent->weight)
        rotate_up(tree, node);
}

void tree_take(struct tree *tree, struct tree_node *node)
{
    SMB_ASSERT(tree->count > 0);
    while (node->left && node->right)
        rotate_up(tree, node->left->weight < node->right->weight ? node->left : node->right);
    struct tree_node *below = node->left ? node->left : node->right;
    *link_to(tree, node) = below;
    if (below)
        below->parent = node->parent;
    tree->count--;
}

struct tree_node *tree_first(const struct tree *tree)
{
    struct tree_node *node = tree->root;
    while (node && node->left)
        node = node->left;
    return node;
}

struct tree_node *tree_next(const struct tree_node *node)
{
    struct tree_node *next = node->right;
    if (next) {
        while (next->left)
            next = next->left;
        return next;
    }
    for (next = node->parent; next && next->right == node; next = node->parent)
        node = next;
    return next;
}

struct tree_node *tree_from(const struct tree *tree, uint64_t high, uint64_t low)
{
    struct tree_node *found = NULL;
    for (struct tree_node *node = tree->root; node;) {
        if (is_less(node->key, high, low)) {
            node = node->right;
        } else {
            found = node;
            node = node->left;
        }
    }
    return found;
}

struct tree_node *tree_find(const struct tree *tree, uint64_t high, uint64_t low)
{
    struct tree_node *found = tree_from(tree, high, low);
    return found && found->key[0] == high && found->key[1] == low ? found : NULL;
}

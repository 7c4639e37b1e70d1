/* tree.h: an ordered set whose items their owner allocates, with a key of two words. Adding,
 * removing, the first item, the next item and searching take logarithmic time.
 *
 * The set is a treap: ordered by key from left to right and by weight from top to bottom. Its depth
 * is logarithmic unless somebody chooses keys with knowledge of the weights, so `weights` starts at
 * a value that no client can know.
 *
 * Nothing is allocated. Several items may have the same key. The owner locks. */
#ifndef SMB_TREE_H
#define SMB_TREE_H

#include <stddef.h>
#include <stdint.h>

struct tree_node {
    struct tree_node *parent, *left, *right;
    uint64_t key[2];
    uint64_t weight;
};

/* All zeros: an empty set. */
struct tree {
    struct tree_node *root;
    uint64_t count;
};

/* The structure in which `node` is the member `name`; NULL for NULL. */
#define TREE_OWNER(node, type, name) ((type *)tree_owner(node, offsetof(type, name)))

static inline void *tree_owner(struct tree_node *node, size_t offset)
{
    return node ? (char *)node - offset : NULL;
}

/* Draws a random start for the weights of one owner's trees. */
uint64_t tree_random(void);

/* Adds `node`, which must be in no tree. Advances *weights. */
void tree_add(struct tree *tree, struct tree_node *node, uint64_t high, uint64_t low,
              uint64_t *weights);
/* Removes `node`, which must be in this tree. */
void tree_take(struct tree *tree, struct tree_node *node);
/* The item with the lowest key; NULL if the tree is empty. */
struct tree_node *tree_first(const struct tree *tree);
/* The item that follows in the order of keys; NULL after the last. */
struct tree_node *tree_next(const struct tree_node *node);
/* The first item whose key is at least this one; NULL if none is. */
struct tree_node *tree_from(const struct tree *tree, uint64_t high, uint64_t low);
/* An item with exactly this key; NULL if none has it. */
struct tree_node *tree_find(const struct tree *tree, uint64_t high, uint64_t low);

#endif

/* tree.h: an ordered set of things that their owner keeps, by a key of two words; adding, taking
 * out, the first, the next and the search take logarithmic time.
 *
 * A treap: in the order of its keys from left to right, of its weights from top to bottom. The
 * depth is logarithmic unless the keys were chosen with knowledge of the weights. So `weights`
 * starts at something that no client can know. Nothing is allocated. Equal keys may be there
 * several times. No locks: the owner's. */
#ifndef SMB_TREE_H
#define SMB_TREE_H

#include <stddef.h>
#include <stdint.h>

struct tree_node {
    struct tree_node *parent, *left, *right;
    uint64_t key[2];
    uint64_t weight;
};

/* Zeroes: empty. */
struct tree {
    struct tree_node *root;
    uint64_t count;
};

/* The thing of which `node` is the member `name`; NULL for NULL. */
#define TREE_OWNER(node, type, name) ((type *)tree_owner(node, offsetof(type, name)))

static inline void *tree_owner(struct tree_node *node, size_t offset)
{
    return node ? (char *)node - offset : NULL;
}

/* The source of the weights of one owner's trees. */
uint64_t tree_random(void);

/* `node` is in no tree. `weights`: moved on. */
void tree_add(struct tree *tree, struct tree_node *node, uint64_t high, uint64_t low,
              uint64_t *weights);
/* `node` is in this tree. */
void tree_take(struct tree *tree, struct tree_node *node);
/* NULL: it is empty. */
struct tree_node *tree_first(const struct tree *tree);
/* In the order of the keys; NULL: it was the last. */
struct tree_node *tree_next(const struct tree_node *node);
/* The first of at least that key; NULL: there is none. */
struct tree_node *tree_from(const struct tree *tree, uint64_t high, uint64_t low);
/* One of exactly that key; NULL: there is none. */
struct tree_node *tree_find(const struct tree *tree, uint64_t high, uint64_t low);

#endif

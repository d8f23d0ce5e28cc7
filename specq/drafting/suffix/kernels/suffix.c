/* A suffix tree of growing texts, and drafts from several trees. reference.py explains each step and gives the same results. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = -1, DEPTH = 16, CONTEXTS = 12, CHILDREN = 32, NODES = 64, TREES = 4, ROOT = 0 };

typedef struct {
    int32_t parent, token, first_child, next, before; /* siblings: the newest comes first */
    int32_t count, at;                                /* how often it occurred, and where it ended last */
} Node;

typedef struct {
    int32_t *tokens; /* of all texts, with NONE after the end of each */
    long num_tokens, room_tokens;
    Node *nodes;
    long num_nodes, room_nodes;
    int32_t *table; /* of children, by parent and token; a power of two places */
    long num_places;
    int32_t active[DEPTH + 1], depths[DEPTH + 1]; /* known nodes that match the text's end, longest first */
    int num_active;
} Tree;

static inline uint64_t place_of(const Tree *t, int32_t parent, int32_t token) {
    uint64_t key = ((uint64_t)(uint32_t)parent << 32 | (uint32_t)token) * 0x9E3779B97F4A7C15ull;
    return (key ^ key >> 29) & (uint64_t)(t->num_places - 1);
}

static int32_t find(const Tree *t, int32_t parent, int32_t token) {
    int32_t newest = t->nodes[parent].first_child; /* it is in the CPU cache, the table is not */
    if (newest == NONE || t->nodes[newest].token == token) return newest;
    for (uint64_t i = place_of(t, parent, token);; i = (i + 1) & (uint64_t)(t->num_places - 1)) {
        int32_t node = t->table[i];
        if (node == NONE || (t->nodes[node].parent == parent && t->nodes[node].token == token)) return node;
    }
}

static void put(Tree *t, int32_t node) {
    uint64_t i = place_of(t, t->nodes[node].parent, t->nodes[node].token);
    while (t->table[i] != NONE) i = (i + 1) & (uint64_t)(t->num_places - 1);
    t->table[i] = node;
}

/* Make room for the maximum that one more token adds: two nodes for each depth. */
static int make_room(Tree *t) {
    if (t->num_tokens + 2 > t->room_tokens) {
        long room = t->room_tokens ? 2 * t->room_tokens : 256;
        int32_t *tokens = realloc(t->tokens, (size_t)room * sizeof *tokens);
        if (!tokens) return -1;
        t->tokens = tokens, t->room_tokens = room;
    }
    if (t->num_nodes + 2 * (DEPTH + 1) > t->room_nodes) {
        long room = t->room_nodes ? 2 * t->room_nodes : 1024;
        Node *nodes = realloc(t->nodes, (size_t)room * sizeof *nodes);
        if (!nodes) return -1;
        t->nodes = nodes, t->room_nodes = room;
        int32_t *table = malloc((size_t)(2 * room) * sizeof *table);
        if (!table) return -1;
        free(t->table);
        t->table = table, t->num_places = 2 * room;
        memset(table, 0xFF, (size_t)t->num_places * sizeof *table);
        for (int32_t node = ROOT + 1; node < t->num_nodes; node++) put(t, node);
    }
    return 0;
}

static void to_front(Tree *t, int32_t child) {
    Node *nodes = t->nodes, *c = nodes + child, *parent = nodes + c->parent;
    if (parent->first_child == child) return;
    nodes[c->before].next = c->next;
    if (c->next != NONE) nodes[c->next].before = c->before;
    c->next = parent->first_child, c->before = NONE;
    nodes[c->next].before = child;
    parent->first_child = child;
}

static void add(Tree *t, int32_t parent, int32_t token, int32_t at) {
    int32_t node = (int32_t)t->num_nodes++, next = t->nodes[parent].first_child;
    t->nodes[node] = (Node){parent, token, NONE, next, NONE, 1, at};
    if (next != NONE) t->nodes[next].before = node;
    t->nodes[parent].first_child = node;
    put(t, node);
}

/* See `reference.ReferenceMatcher._grow`. */
static void grow(Tree *t, int32_t token) {
    int32_t at = (int32_t)t->num_tokens, active[DEPTH + 1], depths[DEPTH + 1];
    int num_active = 0;
    t->tokens[t->num_tokens++] = token;
    for (int i = 0; i <= t->num_active; i++) {
        int is_root = i == t->num_active;
        int32_t node = is_root ? ROOT : t->active[i], depth = is_root ? 0 : t->depths[i];
        int32_t child = find(t, node, token);
        if (child == NONE) {
            add(t, node, token, at);
            continue;
        }
        Node *c = t->nodes + child;
        if (depth + 1 < DEPTH) {
            int32_t follows = t->tokens[c->at + 1], ended = c->at;
            if (c->first_child == NONE && follows != NONE) add(t, child, follows, ended + 1);
            active[num_active] = child, depths[num_active++] = depth + 1;
        }
        c->count++, c->at = at;
        to_front(t, child);
    }
    memcpy(t->active, active, sizeof active), memcpy(t->depths, depths, sizeof depths);
    t->num_active = num_active;
}

Tree *suffix_new(void) {
    Tree *t = calloc(1, sizeof *t);
    if (!t) return NULL;
    t->num_nodes = 1;
    if (make_room(t)) {
        free(t->tokens), free(t->nodes), free(t->table), free(t);
        return NULL;
    }
    t->nodes[ROOT] = (Node){NONE, NONE, NONE, NONE, NONE, 0, NONE};
    return t;
}

void suffix_free(Tree *t) { free(t->tokens), free(t->nodes), free(t->table), free(t); }

/* Return 0, or -1 if memory is short. */
int suffix_extend(Tree *t, const int32_t *tokens, long count) {
    for (long i = 0; i < count; i++) {
        if (make_room(t)) return -1;
        grow(t, tokens[i]);
    }
    return 0;
}

int suffix_end_text(Tree *t) {
    if (make_room(t)) return -1;
    t->tokens[t->num_tokens++] = NONE;
    t->num_active = 0;
    return 0;
}

long suffix_num_nodes(const Tree *t) { return t->num_nodes; }

long suffix_num_tokens(const Tree *t) { return t->num_tokens; }

/* --- drafts: see `reference._draft` */

typedef struct {
    const Tree *tree;
    int32_t node, at, depth; /* node NONE: the sequence occurred once, and the text continues after `at` */
} Context;

static int step(Context *c, int32_t token) {
    const Tree *t = c->tree;
    if (c->node == NONE) {
        if (c->at + 1 >= t->num_tokens || t->tokens[c->at + 1] != token) return 0;
        c->at++;
    } else {
        int32_t child = find(t, c->node, token);
        if (child == NONE) return 0;
        c->at = t->nodes[child].at;
        c->node = t->nodes[child].first_child == NONE ? NONE : child;
    }
    c->depth++;
    return 1;
}

/* Get the tokens that followed, at most CHILDREN, and how often; return how many tokens. */
static int followers(const Context *c, int32_t *tokens, int32_t *counts) {
    const Tree *t = c->tree;
    if (c->node == NONE) {
        if (c->at + 1 >= t->num_tokens || t->tokens[c->at + 1] == NONE) return 0;
        tokens[0] = t->tokens[c->at + 1], counts[0] = 1;
        return 1;
    }
    int found = 0;
    for (int32_t child = t->nodes[c->node].first_child; child != NONE && found < CHILDREN; child = t->nodes[child].next)
        tokens[found] = t->nodes[child].token, counts[found++] = t->nodes[child].count;
    return found;
}

/* Find each suffix of `tail` that has followers in a tree, shortest first; return how many. */
static int matches(const Tree *t, const int32_t *tail, int num_tail, Context *found) {
    int32_t tokens[CHILDREN], counts[CHILDREN];
    int num_found = 0;
    for (int length = 1; length <= num_tail && length <= DEPTH; length++) {
        Context c = {t, ROOT, NONE, 0};
        int is_there = 1;
        for (int i = num_tail - length; is_there && i < num_tail; i++) is_there = step(&c, tail[i]);
        if (!is_there || !followers(&c, tokens, counts)) break;
        found[num_found++] = c;
    }
    return num_found;
}

typedef struct Draft {
    int32_t token, depth;
    double reach;
    struct Draft *parent;       /* NULL: the text's end */
    Context contexts[CONTEXTS]; /* longest first; computed on demand */
    int num_contexts;
    int num_asked, num_begun; /* how many of the parent's contexts, and then of trees, are used */
} Draft;

/* The suffixes of a text in each tree: contexts, shortest first, and their number. */
typedef struct {
    Tree *trees[TREES];
    int num_trees, lengths[TREES];
    Context found[TREES][DEPTH];
} Ends;

/* Set the contexts of the text's end, longest first; of equal ones those of earlier trees first. */
static void begin(Draft *d, const Ends *ends) {
    d->parent = NULL, d->depth = d->num_contexts = 0, d->reach = 1;
    for (int length = DEPTH; length > 0; length--)
        for (int k = 0; k < ends->num_trees; k++)
            if (ends->lengths[k] >= length && d->num_contexts < CONTEXTS)
                d->contexts[d->num_contexts++] = ends->found[k][length - 1];
}

/* Return a context of a draft: its parent's, then that of no token in each tree, one token further. NULL: no more. */
static const Context *context_of(Draft *d, int i, const Ends *ends) {
    while (d->parent && d->num_contexts <= i && d->num_contexts < CONTEXTS) {
        const Context *above = d->num_begun ? NULL : context_of(d->parent, d->num_asked++, ends);
        if (!above && d->num_begun == ends->num_trees) break;
        Context c = above ? *above : (Context){ends->trees[d->num_begun++], ROOT, NONE, 0};
        if (step(&c, d->token)) d->contexts[d->num_contexts++] = c;
    }
    return i < d->num_contexts ? d->contexts + i : NULL;
}

/* Get at most `fan_out` possible next tokens, likeliest first; return how many. */
static int predict(Draft *d, const Ends *ends, const double *doubts, int fan_out, int32_t *found, double *probs) {
    int32_t tokens[CHILDREN], counts[CHILDREN], names[CHILDREN];
    double sums[CHILDREN], left = 1;
    int num_names = 0, num_found = 0;
    const Context *c;
    for (int i = 0; left > 0.02 && (c = context_of(d, i, ends)); i++) {
        int count = followers(c, tokens, counts), depth = c->depth;
        long total = 0;
        for (int k = 0; k < count; k++) total += counts[k];
        if (!total) continue;
        double trust = (double)total / ((double)total + doubts[depth < DEPTH ? depth : DEPTH] * count);
        for (int k = 0; k < count; k++) {
            int at = 0;
            while (at < num_names && names[at] != tokens[k]) at++;
            if (at == CHILDREN) continue;
            if (at == num_names) names[num_names] = tokens[k], sums[num_names++] = 0;
            sums[at] += left * trust * counts[k] / (double)total;
        }
        left *= 1 - trust;
    }
    for (; num_found < fan_out && num_found < num_names; num_found++) {
        int best = 0;
        for (int k = 1; k < num_names; k++)
            if (sums[k] > sums[best]) best = k;
        found[num_found] = names[best], probs[num_found] = sums[best];
        sums[best] = -1;
    }
    return num_found;
}

typedef struct {
    int32_t token, parent;
    double prob, reach;
} Offer;

typedef struct {
    long most, most_depth, fan_out; /* nodes, levels, children of a node */
    double floor;                   /* minimum probability from the text's end on */
} Limits;

/* Draft the likeliest nodes below the end of a text; return how many. probs: f64[most], of each given its parent. */
static long draft(const Ends *ends, Limits limits, const double *doubts, int32_t *tokens, int32_t *parents, double *probs) {
    static _Thread_local Draft drafts[NODES + 1];
    static _Thread_local Offer offers[(NODES + 1) * CHILDREN];
    long num_drafts = 0, num_offers = 0;
    begin(drafts, ends);
    while (num_drafts <= limits.most) {
        Draft *d = drafts + num_drafts; /* the newest node, or the text's end */
        int32_t found[CHILDREN];
        double each[CHILDREN];
        int count = d->depth < limits.most_depth ? predict(d, ends, doubts, (int)limits.fan_out, found, each) : 0;
        for (int i = 0; i < count; i++)
            if (d->reach * each[i] >= limits.floor)
                offers[num_offers++] = (Offer){found[i], (int32_t)num_drafts - 1, each[i], d->reach * each[i]};
        long best = 0;
        for (long i = 1; i < num_offers; i++)
            if (offers[i].reach > offers[best].reach) best = i;
        if (!num_offers || num_drafts == limits.most) break;
        Offer o = offers[best];
        offers[best].reach = -1;
        if (o.reach < 0) break;
        Draft *next = drafts + ++num_drafts;
        next->token = o.token, next->parent = drafts + o.parent + 1, next->depth = next->parent->depth + 1;
        next->reach = o.reach, next->num_contexts = next->num_asked = next->num_begun = 0;
        tokens[num_drafts - 1] = o.token, parents[num_drafts - 1] = o.parent, probs[num_drafts - 1] = o.prob;
    }
    return num_drafts;
}

long suffix_draft(Tree *const *trees, long num_trees, const int32_t *tail, long num_tail, long most, long most_depth,
                  long fan_out, double floor, const double *doubts, int32_t *tokens, int32_t *parents, double *probs) {
    Ends ends = {.num_trees = (int)num_trees};
    for (int k = 0; k < num_trees; k++)
        ends.trees[k] = trees[k], ends.lengths[k] = matches(trees[k], tail, (int)num_tail, ends.found[k]);
    return draft(&ends, (Limits){most, most_depth, fan_out, floor}, doubts, tokens, parents, probs);
}

/* --- many texts at once: see `texts.ReferenceTexts` */

typedef struct {
    Tree *tree;                     /* NULL: no text is open */
    int32_t most_nodes, most_depth; /* of a draft; 0 nodes: the text gets no drafts */
} Text;

enum { NO_TEXT = -1, TOO_OLD = -2, NO_MEMORY = -3 }; /* why a text cannot be drafted for yet */

/* Append the missing tokens up to `length`; return 0, or the reason of a failure. recent: position i is at i % window. */
static int take_in(Tree *t, int32_t length, const int32_t *recent, long window) {
    if (length - t->num_tokens > window) return TOO_OLD;
    while (t->num_tokens < length) {
        if (make_room(t)) return NO_MEMORY;
        grow(t, recent[t->num_tokens % window]);
    }
    return 0;
}

/* Get the suffixes of a text in its own tree, which keeps them (see `grow`), and in others.
 * The longest sequence has no followers. */
static void end_of(Tree *own, Tree *const *others, Ends *ends) {
    ends->num_trees = 1, ends->trees[0] = own, ends->lengths[0] = own->num_active;
    for (int i = 0; i < own->num_active; i++)
        ends->found[0][own->num_active - 1 - i] = (Context){own, own->active[i], NONE, own->depths[i]};
    long num_tail = own->num_tokens < DEPTH ? own->num_tokens : DEPTH;
    for (int k = 0; others && k < TREES - 1 && others[k]; k++) {
        int at = ends->num_trees++;
        ends->trees[at] = others[k];
        ends->lengths[at] = matches(others[k], own->tokens + own->num_tokens - num_tail, (int)num_tail, ends->found[at]);
    }
}

/* Add the newest tokens to texts, and draft what may follow each text, one text after the other.
 * Return how many nodes, or less than 0 if a text is not ready. Then its size is the reason.
 * texts, lengths, limits  [slots]; recent [slots][window]; slots, groups, sizes [num].
 * others  for each group of further trees at most TREES - 1 trees, then NULL. */
long suffix_draft_texts(const Text *texts, long num, const int32_t *slots, const int32_t *groups, const int32_t *lengths,
                        const int32_t *limits, const int32_t *recent, long window, Tree *const (*others)[TREES - 1],
                        long fan_out, double floor, const double *doubts, int32_t *sizes, int32_t *tokens,
                        int32_t *parents, double *scores) {
    long drafted = 0, are_ready = 1;
    for (long i = 0; i < num; i++) {
        int32_t slot = slots[i], room = limits[slot] - lengths[slot] - 1;
        Text text = texts[slot];
        sizes[i] = 0;
        if (text.tree && !text.most_nodes) continue;
        sizes[i] = text.tree ? take_in(text.tree, lengths[slot], recent + slot * window, window) : NO_TEXT;
        if (sizes[i]) {
            are_ready = 0;
            continue;
        }
        Ends ends;
        end_of(text.tree, groups && groups[i] != NONE ? others[groups[i]] : NULL, &ends);
        Limits bounds = {text.most_nodes, room < text.most_depth ? room : text.most_depth, fan_out, floor};
        long count = draft(&ends, bounds, doubts, tokens + drafted, parents + drafted, scores + drafted);
        for (long k = drafted; k < drafted + count; k++) scores[k] = log(scores[k]);
        sizes[i] = (int32_t)count, drafted += count;
    }
    return are_ready ? drafted : -1;
}

/* Suffix trees of many growing texts, and the chains that they promise, in one call.
 *
 * Drafts equal those of draft/suffix/tree.py and expand.py, where the terms are explained, in every
 * bit: change both together. The children of all nodes of a text are in one hash
 * table, by node and token. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROOT 0
#define FIRST_ROOM 64

/* A child: the number of a node, or ~position where what occurred once begins; 0: there is none. */
typedef int32_t Child;

/* start: where it occurred; the latest time at max_depth, where chains read on. */
typedef struct {
    int32_t start, depth, count, parent, link;
    Child best;
    int32_t best_count; /* 0: without children, at max_depth */
} Node;

typedef struct {
    int32_t node, token;
    Child child;
} Edge;

typedef struct {
    int32_t *tokens;
    Node *nodes;
    Edge *edges; /* a power of two of places, at most half of them taken */
    int64_t num_tokens, num_nodes, num_edges;
    int64_t token_room, node_room, edge_room;
    int32_t max_depth;
    int32_t node, length; /* the longest repeated suffix: its deepest node, its length */
} Text;

/* A substring that was counted, and the deepest node on its path. */
typedef struct {
    int32_t node, length, start;
} Match;

typedef struct {
    const int32_t *sizes; /* [max_depth] the most tokens drafted from a match so long */
    double min_prob;
    int32_t max_suffixes;
    int32_t is_compensated; /* what `sum` is in this Python */
    int32_t min_match; /* nothing follows shorter ones */
} Rules;

/* A chain below a match of `length` tokens, which leads to `child`; of at most `room` tokens. */
typedef struct {
    int32_t length;
    Child child;
    int64_t room;
} Chain;

/* The edge that leaves a node with a token, or the empty place where it would be. */
static inline Edge *edge_at(Edge *edges, int64_t room, int32_t node, int32_t token) {
    uint64_t hash = (uint64_t)(uint32_t)node << 32 | (uint32_t)token;
    hash *= UINT64_C(0x9E3779B97F4A7C15);
    hash = (hash ^ hash >> 32) * UINT64_C(0xD6E8FEB86659FD93);
    int64_t at = (int64_t)(hash >> 32) & (room - 1);
    while (edges[at].child && (edges[at].node != node || edges[at].token != token))
        at = (at + 1) & (room - 1);
    return edges + at;
}

static inline Edge *edge_of(const Text *text, int32_t node, int32_t token) {
    return edge_at(text->edges, text->edge_room, node, token);
}

static inline int32_t start_of(const Text *text, Child child) {
    return child < 0 ? ~child : text->nodes[child].start;
}

/* The deepest node on the path of tokens[start : start + length], at or below `node`. */
static int32_t deepest(const Text *text, int32_t node, int32_t length, int32_t start) {
    while (text->nodes[node].depth < length) {
        int32_t token = text->tokens[start + text->nodes[node].depth];
        Child child = edge_of(text, node, token)->child;
        if (child < 0 || text->nodes[child].depth > length) break;
        node = child;
    }
    return node;
}

/* The array with room for as many as are needed; NULL without memory: it stays. */
static void *with_room(void *items, int64_t *room, int64_t needed, size_t size) {
    int64_t larger = *room ? *room : FIRST_ROOM;
    while (larger < needed) larger *= 2;
    if (larger == *room) return items;
    void *moved = realloc(items, (size_t)larger * size);
    if (moved) *room = larger;
    return moved;
}

static int grow_edges(Text *text, int64_t needed) {
    int64_t room = text->edge_room ? text->edge_room : 2 * FIRST_ROOM;
    while (room < 2 * needed) room *= 2;
    if (room == text->edge_room) return 1;
    Edge *edges = calloc((size_t)room, sizeof *edges);
    if (!edges) return 0;
    for (const Edge *edge = text->edges; edge < text->edges + text->edge_room; edge++)
        if (edge->child) *edge_at(edges, room, edge->node, edge->token) = *edge;
    free(text->edges);
    text->edges = edges;
    text->edge_room = room;
    return 1;
}

/* Room for one token and for all that it counts: at most a position for each length of the repeated
 * suffix and one more, with a node and two edges each. 0 without memory: the text stays. */
static int make_room(Text *text) {
    int64_t counted = (int64_t)text->length + 1;
    int32_t *tokens =
        with_room(text->tokens, &text->token_room, text->num_tokens + 1, sizeof *tokens);
    if (tokens) text->tokens = tokens;
    Node *nodes = with_room(text->nodes, &text->node_room, text->num_nodes + counted, sizeof *nodes);
    if (nodes) text->nodes = nodes;
    return tokens && nodes && grow_edges(text, text->num_edges + 2 * counted);
}

static int32_t new_node(Text *text, int32_t start, int32_t depth, int32_t count, int32_t parent) {
    int32_t number = (int32_t)text->num_nodes++;
    text->nodes[number] = (Node){start, depth, count, parent, number, 0, 0};
    return number;
}

static void add_child(Text *text, int32_t node, int32_t token, Child child) {
    *edge_of(text, node, token) = (Edge){node, token, child};
    text->num_edges++;
}

/* Add an occurrence to `node` and to all nodes above it; the child below has it already and counts
 * `count` now. */
static void count_up(Text *text, int32_t node, Child child, int32_t count) {
    while (node != ROOT) {
        Node *here = text->nodes + node;
        if (count >= here->best_count) {
            here->best = child;
            here->best_count = count;
        }
        here->count = count = here->count + 1;
        child = node;
        node = here->parent;
    }
}

/* A new node of `depth` tokens on an edge. The next count below it makes it the best child of
 * the node above, where the one that it parts was. */
static int32_t fork_edge(Text *text, Edge *edge, int32_t depth) {
    Child child = edge->child;
    int32_t count = child < 0 ? 1 : text->nodes[child].count;
    int32_t number = new_node(text, start_of(text, child), depth, count, edge->node);
    Node *fork = text->nodes + number;
    if (child > 0) text->nodes[child].parent = number;
    fork->best = child;
    fork->best_count = count;
    edge->child = number;
    add_child(text, number, text->tokens[fork->start + depth], child);
    return number;
}

/* Make the repeated suffix the one of `length` tokens that ends on an edge, or count it where that
 * is max_depth. */
static void lengthen(Text *text, Edge *edge, int32_t length) {
    int32_t node = edge->node;
    if (length == text->max_depth) {
        int32_t start = (int32_t)text->num_tokens - length;
        if (edge->child < 0) edge->child = new_node(text, start, length, 1, node);
        Node *child = text->nodes + edge->child;
        child->count++;
        child->start = start;
        count_up(text, node, edge->child, child->count);
        length--;
        node = deepest(text, text->nodes[node].link, length, start + 1);
    } else if (edge->child > 0 && text->nodes[edge->child].depth == length) {
        node = edge->child;
    }
    text->node = node;
    text->length = length;
}

/* Lengthen the repeated suffix by the token, or else count it and go on with the next shorter one.
 * There is room. */
static void append(Text *text, int32_t token) {
    int32_t end = (int32_t)text->num_tokens++, node = text->node, length = text->length;
    int32_t unlinked = ROOT; /* a fork whose link is the node that comes next */
    text->tokens[end] = token;
    while (1) {
        int32_t depth = text->nodes[node].depth, start = end - length, fork = ROOT;
        Edge *edge = edge_of(text, node, text->tokens[start + depth]);
        Child child = edge->child;
        int goes_on = child && (length == depth ||
                                text->tokens[start_of(text, child) + length] == token);
        if (child && !goes_on) fork = fork_edge(text, edge, length);
        int32_t end_node = fork ? fork : node;
        if (unlinked) text->nodes[unlinked].link = end_node;
        if (goes_on) {
            lengthen(text, edge, length + 1);
            return;
        }
        unlinked = fork;
        add_child(text, end_node, token, ~start);
        count_up(text, end_node, ~start, 1);
        if (length == 0) break;
        length--;
        node = deepest(text, text->nodes[node].link, length, start + 1);
    }
    text->node = ROOT;
    text->length = 0;
}

/* What the path of a match leads to: the child on whose edge it ends, or else its node. */
static Child below(const Text *text, Match match) {
    int32_t depth = text->nodes[match.node].depth;
    if (match.length == depth) return match.node;
    return edge_of(text, match.node, text->tokens[match.start + depth])->child;
}

/* Follow a chain along the likeliest children, and write it behind its root where drafts are asked
 * for -> nodes, root included. What never parts again is read to the end of the text and on in
 * itself: the text since the occurrence repeats.
 *
 * promised: accepted tokens to expect, added up as Python's `sum` does: since 3.12 with what
 * rounding lost (Neumaier 1974; no probability is larger than the total, which begins with 1). */
static int64_t follow(const Text *text, const Rules *rules, Chain chain, int64_t *drafts,
                      double *probs, double *promised) {
    int64_t count = 1, end = chain.room + 1, depth = chain.length;
    double prob = 1.0, total = 1.0, lost = 0.0;
    while (count < end) {
        Child child = chain.child;
        const Node *node = child > 0 && text->nodes[child].best_count ? text->nodes + child : NULL;
        int64_t start = start_of(text, child), at = start + depth;
        int64_t stop = node ? count + node->depth - depth : end;
        for (; count < stop && count < end; count++, at++) {
            double sum = total + prob;
            lost += (total - sum) + prob;
            total = sum;
            if (at == text->num_tokens) at = start + chain.length;
            if (!drafts) continue;
            drafts[count] = text->tokens[at];
            probs[count] = prob;
        }
        if (!node) break;
        prob *= (double)node->best_count / (double)node->count;
        if (prob < rules->min_prob) break;
        depth = node->depth;
        chain.child = node->best;
    }
    *promised = (rules->is_compensated ? total + lost : total) - 1.0;
    return count;
}

static inline int64_t room_for(const Rules *rules, int32_t length, int64_t most) {
    return most < rules->sizes[length] ? most : rules->sizes[length];
}

/* The chain that promises the most, from the end of a text or from a shorter suffix. */
static Chain best_chain(const Text *text, const Rules *rules, int64_t most) {
    Match match = {text->node, text->length, (int32_t)text->num_tokens - text->length};
    Chain best = {match.length, text->node, 0};
    int32_t occurrences = 0, tried = 0;
    int64_t room = room_for(rules, match.length, most);
    double score = 0.0, promised;
    while ((double)room > score && tried < rules->max_suffixes) {
        Chain chain = {match.length, below(text, match), room};
        int32_t before = occurrences;
        occurrences = chain.child < 0 ? 1 : text->nodes[chain.child].count;
        if (occurrences != before) {
            tried++;
            follow(text, rules, chain, NULL, NULL, &promised);
            if (promised > score) {
                best = chain;
                score = promised;
            }
        }
        /* The empty match, which cannot be shortened, has no room. */
        room = room_for(rules, match.length - 1, most);
        if ((double)room <= score) break;
        match.length--;
        match.start++;
        match.node = deepest(text, text->nodes[match.node].link, match.length, match.start);
    }
    return best;
}

void text_free(Text *text) {
    free(text->tokens);
    free(text->nodes);
    free(text->edges);
    free(text);
}

/* A text of no tokens; NULL without memory. */
void *text_new(int32_t max_depth) {
    Text *text = calloc(1, sizeof(Text));
    if (!text) return NULL;
    text->max_depth = max_depth;
    if (make_room(text)) {
        new_node(text, 0, 0, 0, ROOT);
        return text;
    }
    text_free(text);
    return NULL;
}

int32_t text_match_length(const Text *text) { return text->length; }

int32_t texts_longest_match(Text *const *texts, int64_t num_texts) {
    int32_t longest = 0;
    for (int64_t i = 0; i < num_texts; i++)
        if (texts[i]->length > longest)
            longest = texts[i]->length;
    return longest;
}

/* To texts[i] its num_new[i] tokens -> how many texts have theirs. Without memory it is not all:
 * num_new[i] says how many each took. */
int64_t texts_extend(Text *const *texts, const int32_t *tokens, int64_t *num_new,
                     int64_t num_texts) {
    int64_t done = num_texts;
    for (int64_t i = 0; i < num_texts; i++) {
        int64_t taken = 0;
        while (done == num_texts && taken < num_new[i]) {
            if (make_room(texts[i]))
                append(texts[i], tokens[taken++]);
            else
                done = i;
        }
        tokens += num_new[i];
        num_new[i] = taken;
    }
    return done;
}

/* Of each text its last token and the best chain of at most most[i] tokens behind it, int64
 * [num_texts, width], and the probability of each, float64 [num_texts, width], padded with 0; counts[i]: how
 * many these are, at most `width`. No text is empty. */
void texts_draft(Text *const *texts, const int64_t *most, int64_t num_texts, int64_t width,
                 const Rules *rules, int64_t *drafts, double *probs, int64_t *counts) {
    double promised;
    memset(drafts, 0, (size_t)(num_texts * width) * sizeof *drafts);
    memset(probs, 0, (size_t)(num_texts * width) * sizeof *probs);
    for (int64_t i = 0; i < num_texts; i++, drafts += width, probs += width) {
        int64_t room = texts[i]->length < rules->min_match ? 0 : most[i];
        Chain best = best_chain(texts[i], rules, room);
        drafts[0] = texts[i]->tokens[texts[i]->num_tokens - 1];
        probs[0] = 1.0;
        counts[i] = follow(texts[i], rules, best, drafts, probs, &promised);
    }
}

/* Where the end of a growing text occurred before (prompt lookup decoding), for many texts in one
 * call.
 *
 * Every position is filed under its context of `depths[level]` tokens once a token follows it, in a
 * list of all positions whose context hashes alike, latest first. A lookup reads the list of the
 * longer contexts, then that of the shorter ones, and compares backwards. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LEVELS 2
#define MOST_READ 1024 /* of a list: a context of a long text may be everywhere */
#define FIRST_ROOM 256

typedef struct {
    int32_t *tokens;          /* [room] */
    int32_t *before[LEVELS];  /* [room] the next position of the list, or -1 */
    int32_t *latest[LEVELS];  /* [room] by hash, where a list begins, or -1 */
    int64_t count, filed, room;
    int32_t depths[LEVELS], max_match;
} Text;

static inline int64_t hashed(const Text *text, int64_t end, int32_t depth) {
    uint64_t hash = 0;
    for (int64_t at = end - depth + 1; at <= end; at++)
        hash = (hash ^ (uint32_t)text->tokens[at]) * UINT64_C(0x9E3779B97F4A7C15);
    return (int64_t)((hash >> 32) & (uint64_t)(text->room - 1));
}

static void file_positions(Text *text) {
    for (; text->filed < text->count - 1; text->filed++)
        for (int level = 0; level < LEVELS; level++) {
            if (text->filed + 1 < text->depths[level]) continue;
            int32_t *latest = text->latest[level] + hashed(text, text->filed, text->depths[level]);
            text->before[level][text->filed] = *latest;
            *latest = (int32_t)text->filed;
        }
}

static int grow(int32_t **numbers, int64_t room) {
    int32_t *larger = realloc(*numbers, (size_t)room * sizeof **numbers);
    if (larger) *numbers = larger;
    return larger != NULL;
}

/* Room for more tokens, a power of two; hashes follow it. 0 without memory: the text stays. */
static int make_room(Text *text, int64_t more) {
    int64_t room = text->room ? text->room : FIRST_ROOM;
    while (room < text->count + more) room *= 2;
    if (room == text->room) return 1;
    int enough = grow(&text->tokens, room);
    for (int level = 0; level < LEVELS && enough; level++)
        enough = grow(&text->before[level], room) && grow(&text->latest[level], room);
    if (!enough) return 0;
    text->room = room;
    text->filed = 0;
    for (int level = 0; level < LEVELS; level++)
        memset(text->latest[level], -1, (size_t)room * sizeof(int32_t));
    return 1;
}

/* Tokens that the contexts ending at `end` and at the end of the text share. */
static inline int32_t shared(const Text *text, int64_t end) {
    const int32_t *here = text->tokens + end, *last = text->tokens + text->count - 1;
    int32_t most = end + 1 < text->max_match ? (int32_t)(end + 1) : text->max_match, found = 0;
    while (found < most && here[-found] == last[-found]) found++;
    return found;
}

/* Where the longest context that the text ends in ended before, the latest of equals; -1: nowhere.
 * Contexts longer than max_match count as max_match. */
static int64_t longest_match(const Text *text) {
    int32_t best_there = text->max_match; /* longer ones would be in the list before */
    for (int level = LEVELS - 1; level >= 0; level--) {
        int32_t depth = text->depths[level], best = depth - 1;
        if (text->count < depth) continue;
        int64_t found = -1, at = text->latest[level][hashed(text, text->count - 1, depth)];
        for (int read = 0; at >= 0 && best < best_there && read < MOST_READ; read++) {
            int32_t length = shared(text, at);
            if (length > best) best = length, found = at;
            at = text->before[level][at];
        }
        if (found >= 0) return found;
        best_there = depth - 1;
    }
    return -1;
}

/* A text of no tokens; NULL without memory. */
void *text_new(int32_t min_match, int32_t max_match) {
    Text *text = calloc(1, sizeof(Text));
    if (!text) return NULL;
    int32_t deep = min_match < 4 ? 8 : 2 * min_match;
    text->depths[0] = min_match;
    text->depths[1] = deep < max_match ? deep : max_match;
    text->max_match = max_match;
    return text;
}

void text_free(Text *text) {
    free(text->tokens);
    for (int level = 0; level < LEVELS; level++) {
        free(text->before[level]);
        free(text->latest[level]);
    }
    free(text);
}

/* To texts[i] its num_new[i] tokens -> how many texts have theirs. Without memory it is not all:
 * num_new[i] says how many each took. */
int64_t texts_extend(Text *const *texts, const int32_t *tokens, int64_t *num_new,
                     int64_t num_texts) {
    for (int64_t i = 0; i < num_texts; tokens += num_new[i++]) {
        Text *text = texts[i];
        if (!make_room(text, num_new[i])) {
            memset(num_new + i, 0, (size_t)(num_texts - i) * sizeof *num_new);
            return i;
        }
        memcpy(text->tokens + text->count, tokens, (size_t)num_new[i] * sizeof *tokens);
        text->count += num_new[i];
        file_positions(text);
    }
    return num_texts;
}

/* Of each text its last token and most[i] that followed its longest match, int64 [num_texts,
 * width], padded with 0; counts[i]: how many these are. What runs into the end of the text reads on
 * in itself: the text since the match repeats. No text is empty. */
void texts_draft(Text *const *texts, const int64_t *most, int64_t num_texts, int64_t width,
                 int64_t *drafts, int64_t *counts) {
    memset(drafts, 0, (size_t)(num_texts * width) * sizeof *drafts);
    for (int64_t i = 0; i < num_texts; i++, drafts += width) {
        const Text *text = texts[i];
        int64_t end = most[i] > 0 ? longest_match(text) : -1;
        int64_t place = 0, at = end;
        drafts[0] = text->tokens[text->count - 1];
        counts[i] = end < 0 ? 1 : 1 + most[i];
        while (++place < counts[i]) {
            at = at + 1 < text->count ? at + 1 : end + 1;
            drafts[place] = text->tokens[at];
        }
    }
}

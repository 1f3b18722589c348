/* The JSON reader: the caller walks the text, and strings decode in place.
 *
 * A decoded string is never longer than its source, so decoding writes only over bytes
 * that have been read. The depth of hostile input costs no stack: callers walk the
 * expected levels alone, and ct_json_skip has a stack of fixed size. */
#include "core/base/json.h"

#include <string.h>

enum {
    MAX_DEPTH = 64
};

bool
ct_text_is(ct_text text, const char *other)
{
    return strlen(other) == text.n && memcmp(text.data, other, text.n) == 0;
}

int
ct_text_compare(ct_text a, ct_text b)
{
    int order = memcmp(a.data, b.data, a.n < b.n ? a.n : b.n);
    return order != 0 ? order : (a.n > b.n) - (a.n < b.n);
}

void
ct_json_init(ct_json *json, const char *what, char *text, size_t n)
{
    *json = (ct_json){.what = what, .start = text, .at = text, .end = text + n};
}

ct_status
ct_json_fail(const ct_json *json, const char *message, ct_error *err)
{
    return ct_fail(err, CT_EINVAL, "%s: bad JSON: %s at byte %zu", json->what, message,
                   (size_t)(json->at - json->start));
}

/* RFC 8259 has four kinds of space; isspace depends on the locale. */
static void
skip_space(ct_json *json)
{
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\t' ||
                                    *json->at == '\n' || *json->at == '\r')) {
        json->at++;
    }
}

/* The next byte that is not white space, or 0 at the end; 0 is in no valid text. */
static char
peek(ct_json *json)
{
    skip_space(json);
    if (json->at == json->end) {
        return '\0';
    }
    return *json->at;
}

/* Length of the UTF-8 sequence at p, with `left` >= 1 bytes left; 0 if malformed.
 * Overlong forms and surrogates are malformed, as in Python. */
static size_t
utf8_length(const char *text, size_t left)
{
    const unsigned char *p = (const unsigned char *)text;
    if (p[0] < 0x80) {
        return 1;
    }
    size_t n = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4 || left < n) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    bool low = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xf0 && p[1] < 0x90);
    bool high = (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf4 && p[1] > 0x8f);
    return low || high ? 0 : n;
}

/* Reads four hexadecimal digits at json->at; -1 for anything else. */
static int32_t
read_hex4(ct_json *json)
{
    int32_t value = 0;
    if (json->end - json->at < 4) {
        return -1;
    }
    for (int i = 0; i < 4; i++) {
        char c = *json->at++;
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'f' ? c - 'a' + 10
                    : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                           : -1;
        if (digit < 0) {
            return -1;
        }
        value = value * 16 + digit;
    }
    return value;
}

/* Reads the code point after "\u", or of a surrogate pair of escapes; -1: none. */
static int32_t
read_code_point(ct_json *json)
{
    int32_t code = read_hex4(json);
    if (code < 0xd800 || code > 0xdfff) {
        return code;
    }
    if (code > 0xdbff || json->end - json->at < 6 || memcmp(json->at, "\\u", 2) != 0) {
        return -1;
    }
    json->at += 2;
    int32_t low = read_hex4(json);
    if (low < 0xdc00 || low > 0xdfff) {
        return -1;
    }
    return 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
}

/* Never longer than the escape, so decoding in place cannot overrun. */
static char *
put_utf8(char *out, int32_t code)
{
    if (code < 0x80) {
        *out++ = (char)code;
    }
    else if (code < 0x800) {
        *out++ = (char)(0xc0 | code >> 6);
        *out++ = (char)(0x80 | (code & 0x3f));
    }
    else if (code < 0x10000) {
        *out++ = (char)(0xe0 | code >> 12);
        *out++ = (char)(0x80 | (code >> 6 & 0x3f));
        *out++ = (char)(0x80 | (code & 0x3f));
    }
    else {
        *out++ = (char)(0xf0 | code >> 18);
        *out++ = (char)(0x80 | (code >> 12 & 0x3f));
        *out++ = (char)(0x80 | (code >> 6 & 0x3f));
        *out++ = (char)(0x80 | (code & 0x3f));
    }
    return out;
}

/* Decodes the escape at json->at, after the backslash, to *out; NULL if malformed. */
static char *
decode_escape(ct_json *json, char *out)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (json->at == json->end) {
        return NULL;
    }
    char c = *json->at++;
    if (c == 'u') {
        int32_t code = read_code_point(json);
        return code < 0 ? NULL : put_utf8(out, code);
    }
    const char *found = c == '\0' ? NULL : strchr(from, c);
    if (found == NULL) {
        return NULL;
    }
    *out = to[found - from];
    return out + 1;
}

ct_status
ct_json_string(ct_json *json, ct_text *text, ct_error *err)
{
    if (peek(json) != '"') {
        return ct_json_fail(json, "expected a string", err);
    }
    char *out = ++json->at;
    text->data = out;
    while (json->at < json->end && *json->at != '"') {
        if (*json->at == '\\') {
            json->at++;
            out = decode_escape(json, out);
            if (out == NULL) {
                return ct_json_fail(json, "malformed escape in a string", err);
            }
            continue;
        }
        size_t n = utf8_length(json->at, (size_t)(json->end - json->at));
        if (n == 0 || (unsigned char)*json->at < 0x20) {
            return ct_json_fail(json, "a string is not valid UTF-8 text", err);
        }
        /* Both ends lie in the same text, and overlap after an escape. */
        memmove(out, json->at, n);
        out += n;
        json->at += n;
    }
    if (json->at == json->end) {
        return ct_json_fail(json, "a string does not end", err);
    }
    json->at++;
    text->n = (size_t)(out - text->data);
    return CT_OK;
}

static ct_status
read_key(ct_json *json, ct_text *key, ct_error *err)
{
    ct_status status = ct_json_string(json, key, err);
    if (status != CT_OK) {
        return status;
    }
    if (peek(json) != ':') {
        return ct_json_fail(json, "expected :", err);
    }
    json->at++;
    return CT_OK;
}

/* Moves to the next member, or past the end with *more false. A comma before the end
 * leaves the item's reader at a bracket instead of a value. */
static ct_status
step(ct_json *json, char open, bool *first, bool *more, ct_text *key, ct_error *err)
{
    char next = peek(json);
    *more = next != (open == '{' ? '}' : ']');
    if (!*more) {
        json->at++;
        return CT_OK;
    }
    if (!*first) {
        if (next != ',') {
            return ct_json_fail(json, "expected , or the end of the list", err);
        }
        json->at++;
    }
    *first = false;
    return open == '{' ? read_key(json, key, err) : CT_OK;
}

ct_status
ct_json_each(ct_json *json, char open, ct_json_item_fn *item, void *arg, ct_error *err)
{
    bool first = true, more = true;
    ct_text key = {NULL, 0};
    if (peek(json) != open) {
        return ct_json_fail(json, open == '{' ? "expected {" : "expected [", err);
    }
    json->at++;
    ct_status status = step(json, open, &first, &more, &key, err);
    while (status == CT_OK && more) {
        status = item(arg, json, key, err);
        if (status == CT_OK) {
            status = step(json, open, &first, &more, &key, err);
        }
    }
    return status;
}

ct_status
ct_json_u64(ct_json *json, uint64_t *value, ct_error *err)
{
    char c = peek(json);
    uint64_t v = 0;
    if (c < '0' || c > '9') {
        return ct_json_fail(json, "expected a whole number >= 0", err);
    }
    char *begin = json->at;
    for (; json->at < json->end && *json->at >= '0' && *json->at <= '9'; json->at++) {
        uint64_t digit = (uint64_t)(*json->at - '0');
        /* A wrapped offset would pass later checks against the file's size. */
        if (v > (UINT64_MAX - digit) / 10) {
            return ct_json_fail(json, "a number is too large", err);
        }
        v = v * 10 + digit;
    }
    /* JSON has no leading zeros, and 1.0 or 1e3 would be cut at the point. */
    if ((c == '0' && json->at - begin > 1) ||
        (json->at < json->end && strchr(".eE", *json->at) != NULL)) {
        return ct_json_fail(json, "expected a whole number >= 0", err);
    }
    *value = v;
    return CT_OK;
}

/* Skips a number, true, false or null; checks the characters alone, as no value is
 * read.
 */
static ct_status
skip_word(ct_json *json, ct_error *err)
{
    char *begin = json->at;
    /* strchr finds the terminator too: a NUL byte must end the word. */
    while (json->at < json->end && *json->at != '\0' &&
           strchr("+-.0123456789aeflnrstuE", *json->at) != NULL) {
        json->at++;
    }
    return json->at > begin ? CT_OK : ct_json_fail(json, "expected a value", err);
}

/* Walks with an explicit stack: brackets[d] is the bracket open at depth d. */
ct_status
ct_json_skip(ct_json *json, ct_error *err)
{
    char brackets[MAX_DEPTH];
    bool firsts[MAX_DEPTH];
    int depth = 0;
    ct_text text;
    do {
        ct_status status = CT_OK;
        bool more = true;
        if (depth > 0) {
            status =
                step(json, brackets[depth - 1], &firsts[depth - 1], &more, &text, err);
        }
        char next = peek(json);
        if (status != CT_OK) {
            return status;
        }
        if (!more) {
            depth--;
        }
        else if (next == '{' || next == '[') {
            /* The stack has this many places. */
            if (depth == MAX_DEPTH) {
                return ct_json_fail(json, "nested too deep", err);
            }
            json->at++;
            brackets[depth] = next;
            firsts[depth++] = true;
        }
        else {
            status =
                next == '"' ? ct_json_string(json, &text, err) : skip_word(json, err);
            if (status != CT_OK) {
                return status;
            }
        }
    } while (depth > 0);
    return CT_OK;
}

/* peek returns 0 for a NUL byte too, hence the second comparison. */
ct_status
ct_json_finish(ct_json *json, ct_error *err)
{
    return peek(json) == '\0' && json->at == json->end
               ? CT_OK
               : ct_json_fail(json, "text after the end", err);
}

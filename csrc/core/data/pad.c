#include "core/data/pad.h"

#include <string.h>

void
ct_pad_row(const ct_pad_rule *rule, void *row, const void *values, size_t n)
{
    const size_t item = rule->item_bytes;
    const unsigned char *from = values;
    unsigned char *to = row;
    if (n == 0) {
        return;
    }
    if (rule->left) {
        to += (rule->width - n) * item;
    }
    if (rule->rotate) {
        memcpy(to, rule->first != NULL ? rule->first : from + (n - 1) * item, item);
        to += item;
        n--;
    }
    memcpy(to, from, n * item);
}

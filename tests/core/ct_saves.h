/* Looks at the folders of saves below `root`, which the test defines before. */
#ifndef CT_SAVES_H
#define CT_SAVES_H

#include "core/checkpoint/manifest.h"
#include "ct_test.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>

static const char *
below(const char *name)
{
    static char path[128];
    (void)snprintf(path, sizeof path, "%s/%s", root, name);
    return path;
}

static ct_status
count_problem(void *arg, const char *problem, ct_error *err)
{
    (void)problem;
    (void)err;
    ++*(int *)arg;
    return CT_OK;
}

/* How many files of the manifest are damaged; -1 without a manifest. */
static int
problems_of(const char *name)
{
    int n = 0;
    return ct_manifest_verify(below(name), count_problem, &n, NULL) == CT_OK ? n : -1;
}

static size_t
entries_in_root(void)
{
    size_t n = 0;
    struct dirent *entry;
    DIR *dir = opendir(root);
    CHECK(dir != NULL);
    while ((entry = readdir(dir)) != NULL) {
        n += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0;
    }
    (void)closedir(dir);
    return n;
}

#endif

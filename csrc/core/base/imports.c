/* The dynamic linker enters the addresses of imported functions into a table of the
 * library, at the places that the library's relocations name. Replacing an entry
 * affects the calls of this library alone: the symbol stays the same for others. */
#define _GNU_SOURCE /* dl_iterate_phdr */

#include "core/base/imports.h"

#include <stdint.h>
#include <string.h>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))

#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#ifdef __x86_64__
enum {
    TABLE_ENTRY = R_X86_64_GLOB_DAT,
    CALL_ENTRY = R_X86_64_JUMP_SLOT
};
#else
enum {
    TABLE_ENTRY = R_AARCH64_GLOB_DAT,
    CALL_ENTRY = R_AARCH64_JUMP_SLOT
};
#endif

typedef struct search {
    const char *library, *function;
    ct_function *replacement;
    bool replaced;
} search;

/* The relocations, from the library's dynamic section. */
typedef struct tables {
    const Elf64_Sym *symbols;
    const char *names;
    const Elf64_Rela *relocations[2];
    size_t bytes[2];
} tables;

/* The place of an address in the library's file. */
static void *
locate(const struct dl_phdr_info *info, Elf64_Addr at)
{
    return (void *)(info->dlpi_addr + at); /* NOLINT(performance-no-int-to-ptr) */
}

/* glibc has added the library's address to the entry, musl has not. */
static const void *
address_of(const struct dl_phdr_info *info, const Elf64_Dyn *entry)
{
    const Elf64_Addr value = entry->d_un.d_ptr;
    return locate(info, value < info->dlpi_addr ? value : value - info->dlpi_addr);
}

static tables
read_tables(const struct dl_phdr_info *info, const Elf64_Dyn *entry)
{
    tables t = {.symbols = NULL};
    for (; entry->d_tag != DT_NULL; entry++) {
        switch (entry->d_tag) {
        case DT_SYMTAB:
            t.symbols = address_of(info, entry);
            break;
        case DT_STRTAB:
            t.names = address_of(info, entry);
            break;
        case DT_RELA:
            t.relocations[0] = address_of(info, entry);
            break;
        case DT_RELASZ:
            t.bytes[0] = entry->d_un.d_val;
            break;
        case DT_JMPREL:
            t.relocations[1] = address_of(info, entry);
            break;
        case DT_PLTRELSZ:
            t.bytes[1] = entry->d_un.d_val;
            break;
        default:
            break;
        }
    }
    return t;
}

/* The linker makes a part of the filled tables read-only. */
static bool
is_read_only(const struct dl_phdr_info *info, Elf64_Addr at)
{
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const Elf64_Phdr *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_GNU_RELRO && at - header->p_vaddr < header->p_memsz) {
            return true;
        }
    }
    return false;
}

static bool
replace(const struct dl_phdr_info *info, Elf64_Addr at, ct_function *replacement)
{
    ct_function **place = (ct_function **)locate(info, at);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *start = (char *)place - (uintptr_t)place % page;
    const bool read_only = is_read_only(info, at);
    if (read_only && mprotect(start, page, PROT_READ | PROT_WRITE) != 0) {
        return false;
    }
    __atomic_store_n(place, replacement, __ATOMIC_SEQ_CST);
    if (read_only) {
        (void)mprotect(start, page, PROT_READ);
    }
    return true;
}

static void
replace_all(const struct dl_phdr_info *info, const tables *t, search *wanted)
{
    for (size_t table = 0; table < 2; table++) {
        const Elf64_Rela *at = t->relocations[table];
        const size_t n = at == NULL ? 0 : t->bytes[table] / sizeof *at;
        for (const Elf64_Rela *end = at + n; at < end; at++) {
            const uint64_t type = ELF64_R_TYPE(at->r_info);
            const char *name = t->names + t->symbols[ELF64_R_SYM(at->r_info)].st_name;
            if ((type == TABLE_ENTRY || type == CALL_ENTRY) &&
                strcmp(name, wanted->function) == 0 &&
                replace(info, at->r_offset, wanted->replacement)) {
                wanted->replaced = true;
            }
        }
    }
}

static int
visit(struct dl_phdr_info *info, size_t bytes, void *arg)
{
    search *wanted = arg;
    const char *slash = strrchr(info->dlpi_name, '/');
    const char *name = slash == NULL ? info->dlpi_name : slash + 1;
    (void)bytes;
    if (strcmp(name, wanted->library) != 0) {
        return 0;
    }
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const Elf64_Phdr *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_DYNAMIC) {
            const tables t = read_tables(info, locate(info, header->p_vaddr));
            replace_all(info, &t, wanted);
        }
    }
    return 1;
}

bool
ct_import_replace(const char *library, const char *function, ct_function *replacement)
{
    search wanted = {library, function, replacement, false};
    (void)dl_iterate_phdr(visit, &wanted);
    return wanted.replaced;
}

#else

bool
ct_import_replace(const char *library, const char *function, ct_function *replacement)
{
    (void)library;
    (void)function;
    (void)replacement;
    return false;
}

#endif

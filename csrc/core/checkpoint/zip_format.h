/* Signatures, sizes and field offsets of a ZIP archive, for its writer and reader. */
#ifndef CT_ZIP_FORMAT_H
#define CT_ZIP_FORMAT_H

enum {
    ZIP_LOCAL_SIGNATURE = 0x04034b50,
    ZIP_CENTRAL_SIGNATURE = 0x02014b50,
    ZIP_END_SIGNATURE = 0x06054b50,
    ZIP_END64_SIGNATURE = 0x06064b50,
    ZIP_LOCATOR64_SIGNATURE = 0x07064b50,

    ZIP_LOCAL_BYTES = 30,
    ZIP_CENTRAL_BYTES = 46,
    ZIP_END_BYTES = 22,
    ZIP_END64_BYTES = 56,
    ZIP_LOCATOR64_BYTES = 20,

    ZIP_LOCAL_CRC = 14,
    ZIP_CENTRAL_CRC = 16,

    ZIP_VERSION = 20,
    ZIP_VERSION64 = 45,
    ZIP_UTF8 = 0x0800,    /* flag: names are UTF-8 */
    ZIP_EXTRA64 = 0x0001, /* extra field with sizes of 64 bits */
    ZIP_EXTRA_PAD = 0x4246,
    ZIP_DATE = 0x0021 /* 1980-01-01: the same bytes for the same content */
};

#define ZIP_MAX32 0xffffffffu /* a 32-bit field that stands for one of 64 bits */
#define ZIP_MAX16 0xffffu

#endif

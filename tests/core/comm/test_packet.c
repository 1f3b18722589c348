#include "ct_test.h"

#include "core/base/alloc.h"
#include "core/comm/bytes.h"

#include <stdint.h>
#include <string.h>

static void
test_records_come_back_in_order_and_aligned(void)
{
    ct_packet packet = {0};
    ct_error err;
    char text[100];
    for (size_t n = 0; n <= 100; n++) {
        memset(text, (int)n, sizeof text);
        CHECK(ct_packet_put(&packet, text, n, &err) == CT_OK);
        CHECK(packet.n % CT_PACKET_ALIGNMENT == 0);
    }
    ct_packet_reader reader = {.data = packet.data, .n = packet.n};
    for (size_t n = 0; n <= 100; n++) {
        const unsigned char *record = ct_packet_take(&reader, n);
        CHECK(record != NULL && (uintptr_t)record % CT_PACKET_ALIGNMENT == 0);
        for (size_t i = 0; i < n; i++) {
            CHECK(record[i] == n);
        }
    }
    CHECK(ct_packet_take(&reader, 1) == NULL);
    ct_packet_fini(&packet);
    CHECK(packet.data == NULL && packet.n == 0);
}

static void
test_a_message_that_ends_early_gives_no_record(void)
{
    const char text[40] = {0};
    ct_packet_reader reader = {.data = text, .n = 40};
    CHECK(ct_packet_take(&reader, 40) == NULL); /* its padding is missing */
    CHECK(ct_packet_take(&reader, SIZE_MAX) == NULL);
    CHECK(reader.at == 0);
    CHECK(ct_packet_take(&reader, 32) == text);
    CHECK(ct_packet_take(&reader, 9) == NULL);
}

static void
test_without_memory_the_message_stays(void)
{
    ct_packet packet = {0};
    ct_error err;
    const char text[4096] = {1};
    CHECK(ct_packet_put(&packet, text, 16, &err) == CT_OK);
    ct_alloc_fail_after(1);
    CHECK(ct_packet_put(&packet, text, sizeof text, &err) == CT_ENOMEM);
    ct_alloc_fail_after(0);
    CHECK(packet.n == 16 && memcmp(packet.data, text, 16) == 0);
    CHECK(ct_packet_put(&packet, text, SIZE_MAX - 8, &err) == CT_ENOMEM);
    ct_packet_fini(&packet);
}

int
main(void)
{
    test_records_come_back_in_order_and_aligned();
    test_a_message_that_ends_early_gives_no_record();
    test_without_memory_the_message_stays();
    return 0;
}

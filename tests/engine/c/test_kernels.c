/* The kernels give the same bits on every processor, with each of its instruction sets. The hashes
 * are of the results on x86-64, which the Python tests compare with numpy element by element. Only
 * the kind of a NaN may differ. */
#include <string.h>

#include "check.h"
#include "kernels/kernels.h"
#include "random.h"

enum { BYTES = (1 << 19) + 96, WIRE_COUNT = 70001, STEP_COUNT = 40003 };
static const uint64_t HASH_SEED = 0xCBF29CE484222325;

static uint64_t hash_of(uint64_t hash, const void *data, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ ((const uint8_t *)data)[i]) * 0x100000001B3;
    return hash;
}

static void fill_with(struct random *random, void *data, size_t bytes)
{
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        uint64_t word = random_next(random);
        memcpy((uint8_t *)data + i, &word, 8);
    }
}

/* Makes all NaNs among `count` elements of `bytes` the same; `infinity` has all bits of the
 * exponent, `sign` the bit of the sign. */
static void same_nans(void *data, size_t count, size_t bytes, uint64_t infinity, uint64_t sign)
{
    for (size_t i = 0; i < count; i++) {
        uint8_t *at = (uint8_t *)data + i * bytes;
        uint64_t bits = 0, nan = infinity | 1;
        memcpy(&bits, at, bytes); /* little-endian */
        if ((bits & ~sign) > infinity)
            memcpy(at, &nan, bytes);
    }
}

static void same_nans_of(int dtype, void *data, size_t count)
{
    switch (dtype) {
    case SMB_FLOAT16: same_nans(data, count, 2, 0x7C00, 0x8000); break;
    case SMB_BFLOAT16: same_nans(data, count, 2, 0x7F80, 0x8000); break;
    case SMB_FLOAT32: same_nans(data, count, 4, 0x7F800000, 0x80000000); break;
    case SMB_FLOAT64: same_nans(data, count, 8, 0x7FF0000000000000, 0x8000000000000000); break;
    }
}

static void check_hash(const char *of, uint64_t found, uint64_t expected)
{
    if (found != expected)
        fprintf(stderr, "%s with %s: hash %#llx\n", of, smb_isa_name(smb_isa_current()),
                (unsigned long long)found);
    CHECK(found == expected);
}

/* Every operation with scales that round, over any bits; for 16-bit types every value is a
 * source. */
static void operations(void)
{
    static const struct {
        const char *name;
        int dtype;
        uint64_t hash;
    } types[] = {
        {"uint8", SMB_UINT8, 0xA13325902D50830A},
        {"float16", SMB_FLOAT16, 0x371108ADC5C4CB50},
        {"bfloat16", SMB_BFLOAT16, 0x6720EB3C1EC11100},
        {"float32", SMB_FLOAT32, 0xA0F3C43B895F26E},
        {"int32", SMB_INT32, 0xB3CF4B526CE7B334},
        {"float64", SMB_FLOAT64, 0x6DBD9432CA6200F6},
        {"int64", SMB_INT64, 0xCCF9B33CA4733C1E},
    };
    static const double scales[] = {1, 3, 0.5, -2, -0.3};
    static _Alignas(8) uint8_t target[BYTES], source[BYTES];
    for (int isa = 0; isa < smb_isa_count(); isa += check_thinned()) {
        CHECK_EQ(smb_isa_select(isa), SMB_OK);
        for (size_t t = 0; t < sizeof types / sizeof *types; t++) {
            struct random random = random_make(20261123);
            uint64_t hash = HASH_SEED, bytes = smb_dtype_bytes(types[t].dtype);
            uint64_t count = bytes == 2 ? 2 * 65536 + 7 : 50003; /* not a multiple of a vector */
            for (int op = SMB_SUM; op <= SMB_ELASTIC; op++) {
                for (size_t s = 0; s < sizeof scales / sizeof *scales; s++) {
                    if (!smb_op_accepts(types[t].dtype, op, scales[s]))
                        continue;
                    fill_with(&random, target, count * bytes + 7);
                    fill_with(&random, source, count * bytes + 7);
                    for (int i = 0; bytes == 2 && i < 65536; i++)
                        ((uint16_t *)(void *)source)[i] = (uint16_t)i;
                    CHECK_EQ(smb_kernel_apply(types[t].dtype, op, target, source, count, scales[s]),
                             SMB_OK);
                    same_nans_of(types[t].dtype, target, count);
                    hash = hash_of(hash, target, count * bytes);
                }
            }
            check_hash(types[t].name, hash, types[t].hash);
        }
    }
}

/* The wire formats of float32: any bits, which are mostly too large or too small, and values around
 * 1. */
static void encodings(void)
{
    static const struct {
        const char *name;
        int wire, sent_as;
        uint64_t hash;
    } wires[] = {
        {"wire bfloat16", SMB_WIRE_BFLOAT16, SMB_BFLOAT16, 0x2CBE41D65ABDEF02},
        {"wire float16", SMB_WIRE_FLOAT16, SMB_FLOAT16, 0xF0D05F6EC5077716},
        {"wire int8", SMB_WIRE_INT8, SMB_UINT8, 0x5DDF7E0F5ACAA273},
        {"wire int4", SMB_WIRE_INT4, SMB_UINT8, 0xF6588C403B290247},
    };
    static uint32_t from[WIRE_COUNT + 1];
    static float sum[WIRE_COUNT];
    static _Alignas(8) uint8_t sent[4 * WIRE_COUNT];
    for (int isa = 0; isa < smb_isa_count(); isa += check_thinned()) {
        CHECK_EQ(smb_isa_select(isa), SMB_OK);
        for (size_t w = 0; w < sizeof wires / sizeof *wires; w++) {
            struct random random = random_make(20261124);
            uint64_t hash = HASH_SEED;
            memset(sum, 0, sizeof sum);
            for (int round = 0; round < 8; round++) {
                fill_with(&random, from, sizeof from);
                for (int i = 0; round > 3 && i < WIRE_COUNT; i++)
                    from[i] = (from[i] & 0x807FFFFF) | (uint32_t)(110 + random_below(&random, 20))
                                                           << 23;
                CHECK_EQ(smb_kernel_encode(wires[w].wire, from, WIRE_COUNT, sent), SMB_OK);
                same_nans_of(wires[w].sent_as, sent, WIRE_COUNT);
                hash = hash_of(hash, sent, smb_wire_bytes(wires[w].wire, WIRE_COUNT));
                CHECK_EQ(
                    smb_kernel_apply_encoded(wires[w].wire, SMB_SUM, sum, sent, 0, WIRE_COUNT, 0.5),
                    SMB_OK);
                same_nans_of(SMB_FLOAT32, sum, WIRE_COUNT);
                hash = hash_of(hash, sum, sizeof sum);
            }
            check_hash(wires[w].name, hash, wires[w].hash);
        }
    }
}

static void fill_with_fractions(struct random *random, float *values, float lowest)
{
    for (int i = 0; i < STEP_COUNT; i++)
        values[i] = lowest + (float)(random_next(random) >> 40) * 0x1p-24F;
}

/* The first step of each rule, because later factors come from the C library's pow. */
static void steps(void)
{
    static const struct {
        const char *name;
        int rule;
        uint64_t hash;
    } rules[] = {
        {"sgd", SMB_RULE_SGD, 0x8E71853CD8C9DEF2},
        {"momentum", SMB_RULE_MOMENTUM, 0x7269D0186F38EDDB},
        {"nesterov", SMB_RULE_NESTEROV, 0x917E5E95A5C076E2},
        {"adam", SMB_RULE_ADAM, 0xC79598637D998498},
        {"adamw", SMB_RULE_ADAMW, 0x6ADF7611BB537B0B},
        {"elastic", SMB_RULE_ELASTIC, 0x56E5CF39CCED4A9F},
    };
    static const struct smb_hyper hyper = {.lr = 0.01,
                                           .scale = 0.7,
                                           .weight_decay = 0.01,
                                           .mu = 0.9,
                                           .beta1 = 0.9,
                                           .beta2 = 0.999,
                                           .eps = 1e-8,
                                           .step = 1,
                                           .alpha = 0.3};
    static float b[STEP_COUNT], g[STEP_COUNT], m[STEP_COUNT], v[STEP_COUNT];
    for (int isa = 0; isa < smb_isa_count(); isa += check_thinned()) {
        CHECK_EQ(smb_isa_select(isa), SMB_OK);
        for (size_t r = 0; r < sizeof rules / sizeof *rules; r++) {
            struct random random = random_make(20261125);
            fill_with_fractions(&random, b, -0.5F);
            fill_with_fractions(&random, g, -0.5F);
            fill_with_fractions(&random, m, -0.5F);
            fill_with_fractions(&random, v, 0);
            CHECK_EQ(smb_kernel_step(rules[r].rule, b, g, m, v, STEP_COUNT, &hyper), SMB_OK);
            uint64_t hash = hash_of(hash_of(hash_of(HASH_SEED, b, sizeof b), m, sizeof m), v,
                                    sizeof v);
            check_hash(rules[r].name, hash, rules[r].hash);
        }
    }
}

/* The published check value of CRC-32C, and sums of every length beyond three streams. */
static void checksums(void)
{
    static uint8_t data[4096];
    struct random random = random_make(20261126);
    fill_with(&random, data, sizeof data);
    for (int isa = 0; isa < smb_isa_count(); isa += check_thinned()) {
        CHECK_EQ(smb_isa_select(isa), SMB_OK);
        CHECK_EQ(smb_crc32c(0, "123456789", 9), 0xE3069283);
        uint32_t crc = 0;
        for (uint64_t bytes = 0; bytes < sizeof data; bytes++)
            crc = smb_crc32c(crc, data + sizeof data - bytes, bytes);
        check_hash("crc32c", crc, 0x45F235F2);
    }
}

int main(void)
{
    static const struct test tests[] = {TEST(operations), TEST(encodings), TEST(steps),
                                        TEST(checksums)};
    return RUN_TESTS(tests);
}

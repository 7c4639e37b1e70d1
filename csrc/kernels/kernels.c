/* Element-wise kernels: one body, compiled for several instruction sets. The best one is chosen
 * when the library loads.
 *
 * Invariant: every path gives the same bits, and these are the bits that numpy gives (ml_dtypes for
 * bfloat16); only the sign and payload of a NaN may differ. Hence no fused multiply-add
 * (-ffp-contract=off) and no reassociation. */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "base/types.h"
#include "kernels/delta.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
enum { AMD_ZEN5 = 26 }; /* the family number in CPUID */
#endif

/* (a < b or a is NaN) ? a : b, like numpy's minimum: NaN wins, and of two equal zeros the
 * second. */
#define FLOAT_MIN(b, a) ((b) < (a) || (b) != (b) ? (b) : (a))
#define FLOAT_MAX(b, a) ((b) > (a) || (b) != (b) ? (b) : (a))
/* numpy's float16 loops compare with <=: of two equal zeros the first. */
#define HALF_MIN(b, a) ((b) <= (a) || (b) != (b) ? (b) : (a))
#define HALF_MAX(b, a) ((b) >= (a) || (b) != (b) ? (b) : (a))
#define INT32_MIN_OF(b, a) ((int32_t)(b) < (int32_t)(a) ? (b) : (a))
#define INT32_MAX_OF(b, a) ((int32_t)(b) > (int32_t)(a) ? (b) : (a))
#define INT64_MIN_OF(b, a) ((int64_t)(b) < (int64_t)(a) ? (b) : (a))
#define INT64_MAX_OF(b, a) ((int64_t)(b) > (int64_t)(a) ? (b) : (a))
#define UNSIGNED_MIN_OF(b, a) ((b) < (a) ? (b) : (a))
#define UNSIGNED_MAX_OF(b, a) ((b) > (a) ? (b) : (a))

static inline uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float bfloat16_to_float(uint16_t half)
{
    return float_from_bits((uint32_t)half << 16);
}

/* Round to nearest, ties to even; NaN stays NaN (adding the rounding term could carry it into
 * infinity). */
static inline uint16_t float_to_bfloat16(float value)
{
    uint32_t bits = float_bits(value);
    uint16_t rounded = (uint16_t)((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
    uint16_t quiet = (uint16_t)((bits >> 16) | 0x40U);
    return (bits & 0x7FFFFFFFU) > 0x7F800000U ? quiet : rounded;
}

static inline float float16_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000U) << 16;
    uint32_t magnitude = half & 0x7FFFU;
    if (magnitude >= 0x7C00U) /* infinity, NaN */
        return float_from_bits(sign | 0x7F800000U | (magnitude & 0x3FFU) << 13 |
                               (magnitude > 0x7C00U ? 0x400000U : 0U));
    if (magnitude < 0x400U) /* zero, subnormal: magnitude * 2^-24, exact */
        return float_from_bits(sign | float_bits((float)magnitude * 0x1p-24F));
    return float_from_bits(sign | ((magnitude << 13) + 0x38000000U));
}

/* Rounds a float to nearest, ties to even. */
static inline uint16_t float_to_float16(float value)
{
    uint32_t bits = float_bits(value);
    uint16_t sign = (uint16_t)((bits >> 16) & 0x8000U);
    uint32_t magnitude = bits & 0x7FFFFFFFU;
    if (magnitude > 0x7F800000U)
        return (uint16_t)(sign | 0x7E00U | (magnitude >> 13 & 0x3FFU));
    if (magnitude >= 0x477FF000U) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7C00U);
    if (magnitude < 0x38800000U) {
        /* below the smallest normal number: adding 0.5 aligns the mantissa, and the adder rounds */
        float aligned = float_from_bits(magnitude) + 0.5F;
        return (uint16_t)(sign | (float_bits(aligned) - 0x3F000000U));
    }
    return (uint16_t)(sign | ((magnitude - 0x38000000U + 0xFFFU + ((magnitude >> 13) & 1U)) >> 13));
}

/* Goes through a float that is rounded to odd, so that the value is rounded once, not twice. */
static uint16_t double_to_float16(double value)
{
    float narrow = (float)value;
    if (isfinite(narrow) && (double)narrow != value) {
        uint32_t bits = float_bits(narrow);
        if (fabs((double)narrow) > fabs(value))
            bits -= 1;
        narrow = float_from_bits(bits | 1U);
    }
    return float_to_float16(narrow);
}

/* GCC and clang have different pragmas for "this target from here on". */
#if defined(__clang__)
#define EACH_PRAGMA "clang loop vectorize(assume_safety)"
#define UNROLL_PRAGMA "clang loop interleave_count(4)"
#define TARGET_BEGIN(names) \
    PRAGMA(clang attribute push(__attribute__((target(names))), apply_to = function))
#define TARGET_END PRAGMA(clang attribute pop)
#define AVX512(width) \
    "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c" /* clang chooses the vector width itself */
#define HAS_F16C true /* clang 14 cannot query it; every processor with AVX2 has it */
#else
#define EACH_PRAGMA "GCC ivdep"
#define UNROLL_PRAGMA "GCC unroll 4" /* 13 % faster on 4 MiB: more loads in flight at once */
#define TARGET_BEGIN(names) PRAGMA(GCC push_options) PRAGMA(GCC target(names))
#define TARGET_END PRAGMA(GCC pop_options)
#define AVX512(width) "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=" #width
#define HAS_F16C __builtin_cpu_supports("f16c")
#endif
#define PRAGMA(text) _Pragma(#text)

#define ISA(name) name##_generic
#include "kernels/delta_body.inc"
#include "kernels/kernels_body.inc"
#undef ISA

#if defined(__x86_64__)
#define HAVE_F16C
TARGET_BEGIN("avx2,f16c")
#define ISA(name) name##_avx2
#include "kernels/delta_body.inc"
#include "kernels/kernels_body.inc"
#undef ISA
TARGET_END

/* 256-bit vectors here too: with 512 bits, a load that is not aligned to 64 bytes touches two cache
 * lines. An older EPYC was 4 to 20 % slower from memory. */
TARGET_BEGIN(AVX512(256))
#define ISA(name) name##_avx512
#include "kernels/delta_body.inc"
#include "kernels/kernels_body.inc"
#undef ISA
TARGET_END

/* With 512 bits, for processors that move and add so many bits at once. */
TARGET_BEGIN(AVX512(512))
#define ISA(name) name##_avx512_wide
#include "kernels/delta_body.inc"
#include "kernels/kernels_body.inc"
#undef ISA
TARGET_END
#undef HAVE_F16C
#endif

typedef void (*apply_function)(int dtype, int op, void *target, const void *source, uint64_t count,
                               double scale);
typedef void (*encode_function)(int wire, const float *from, uint64_t count, uint8_t *to);
typedef void (*apply_encoded_function)(int wire, int op, float *target, const uint8_t *from,
                                       uint64_t first, uint64_t count, float scale);
typedef void (*step_function)(int rule, float *b, const float *g, float *m, float *v,
                              uint64_t count, const struct factors *c);
typedef bool (*delta_function)(uint32_t width, uint8_t *old, const uint8_t *fresh, uint64_t count,
                               uint64_t first, struct delta_out *out);

static struct isa {
    const char *name;
    apply_function apply;
    encode_function encode;
    apply_encoded_function apply_encoded;
    step_function step;
    delta_function delta_encode;
    bool crc_instruction;
    bool wide; /* with copies of the same width */
} isas[4] = {{"generic", apply_generic, encode_generic, apply_encoded_generic, step_generic,
              delta_encode_generic, false, false}};
static int isa_count = 1;
static _Atomic int isa_current; /* relaxed: every instruction set gives the same bits */

#if defined(__x86_64__)
static bool has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

/* AMD's Zen 5 and later, measured on one: additions of 512 bits are 1.2 to 1.4 times as fast within
 * the cache. `rep movsb` copies 1.03 to 1.6 times as fast from 32 KiB up, and slower up to 16.
 * Other processors were not measured. */
static bool is_wide(void)
{
    unsigned a, b, c, d;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d))
        return false;
    return (a >> 8 & 15U) + (a >> 20 & 255U) >= AMD_ZEN5;
}
#endif

__attribute__((constructor)) static void choose_isa(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && HAS_F16C)
        isas[isa_count++] = (struct isa){
            "avx2",    apply_avx2,        encode_avx2, apply_encoded_avx2,
            step_avx2, delta_encode_avx2, true,        false};
    if (isa_count == 2 && has_avx512())
        isas[isa_count++] = (struct isa){
            "avx512",    apply_avx512,        encode_avx512, apply_encoded_avx512,
            step_avx512, delta_encode_avx512, true,          false};
    isa_current = isa_count - 1;
    if (isa_count == 3) {
        isas[isa_count++] = (struct isa){"avx512-wide",
                                         apply_avx512_wide,
                                         encode_avx512_wide,
                                         apply_encoded_avx512_wide,
                                         step_avx512_wide,
                                         delta_encode_avx512_wide,
                                         true,
                                         true};
        isa_current += is_wide();
    }
#endif
    /* An unknown name is ignored here; the library's loader compares
     * smb_isa_name(smb_isa_current()) with it. */
    const char *wanted = getenv("SMB_ISA");
    for (int isa = 0; wanted && isa < isa_count; isa++) {
        if (strcmp(isas[isa].name, wanted) == 0)
            isa_current = isa;
    }
}

int smb_isa_count(void)
{
    return isa_count;
}

const char *smb_isa_name(int isa)
{
    return isa >= 0 && isa < isa_count ? isas[isa].name : NULL;
}

int smb_isa_current(void)
{
    return isa_current;
}

int smb_isa_select(int isa)
{
    if (isa < 0 || isa >= isa_count)
        return SMB_INVALID;
    isa_current = isa;
    return SMB_OK;
}

int smb_kernel_apply(int dtype, int op, void *target, const void *source, uint64_t count,
                     double scale)
{
    if (!smb_op_accepts(dtype, op, scale))
        return SMB_INVALID;
    if (op == SMB_REPLACE && scale == 1.0)
        kernel_copy(target, source, count * smb_dtype_bytes(dtype), false);
    else
        isas[isa_current].apply(dtype, op, target, source, count, scale);
    return SMB_OK;
}

/* ---- optimizers' steps ----------------------------------------------------------------------- */

struct factors kernel_factors_of(int rule, const struct smb_hyper *hyper)
{
    struct factors factors = {.lr = (float)hyper->lr,
                              .scale = (float)hyper->scale,
                              .decay = (float)hyper->weight_decay,
                              .mu = (float)hyper->mu};
    if (rule == SMB_RULE_ELASTIC) {
        factors.lr = (float)hyper->alpha;
    } else if (smb_rule_states(rule) == 2) {
        factors.lr = (float)(hyper->lr / (1 - pow(hyper->beta1, hyper->step)));
        factors.mu = (float)hyper->beta1;
        factors.one_less_mu = (float)(1 - hyper->beta1);
        factors.beta2 = (float)hyper->beta2;
        factors.one_less_beta2 = (float)(1 - hyper->beta2);
        factors.root = (float)(1 / sqrt(1 - pow(hyper->beta2, hyper->step)));
        factors.eps = (float)hyper->eps;
        factors.keep = (float)(1 - hyper->lr * hyper->weight_decay);
    }
    return factors;
}

void kernel_step(int rule, const struct factors *factors, float *b, const float *g, float *m,
                 float *v, uint64_t count)
{
    isas[isa_current].step(rule, b, g, m, v, count, factors);
}

int smb_kernel_step(int rule, float *b, const float *g, float *m, float *v, uint64_t count,
                    const struct smb_hyper *hyper)
{
    if (!smb_rule_accepts(rule, hyper))
        return SMB_INVALID;
    struct factors factors = kernel_factors_of(rule, hyper);
    kernel_step(rule, &factors, b, g, m, v, count);
    return SMB_OK;
}

/* ---- wire formats of float32
 * ------------------------------------------------------------------ */

int smb_kernel_encode(int wire, const void *from, uint64_t count, void *to)
{
    if (!smb_wire_is_dense(wire))
        return SMB_INVALID;
    isas[isa_current].encode(wire, from, count, to);
    return SMB_OK;
}

int smb_kernel_apply_encoded(int wire, int op, void *target, const void *from, uint64_t first,
                             uint64_t count, double scale)
{
    if (!smb_wire_is_dense(wire) || !smb_op_accepts(SMB_FLOAT32, op, scale))
        return SMB_INVALID;
    isas[isa_current].apply_encoded(wire, op, target, from, first, count, (float)scale);
    return SMB_OK;
}

int smb_kernel_round(int wire, const void *from_, uint64_t count, uint64_t offset,
                     uint32_t chunk_bytes, void *to_)
{
    /* whole blocks, also of int4, counted from each piece's start */
    enum { BLOCK = 4 * SMB_WIRE_BLOCK };
    const float *from = from_;
    float *to = to_;
    uint16_t encoded[BLOCK];
    if (!smb_wire_is_dense(wire) || chunk_bytes == 0 || chunk_bytes % 4 != 0 || offset % 4 != 0)
        return SMB_INVALID;
    uint64_t left = (chunk_bytes - offset % chunk_bytes) / 4; /* left in the piece */
    while (count > 0) {
        uint64_t n = left < BLOCK ? left : BLOCK;
        n = n < count ? n : count;
        isas[isa_current].encode(wire, from, n, (uint8_t *)encoded);
        isas[isa_current].apply_encoded(wire, SMB_REPLACE, to, (const uint8_t *)encoded, 0, n,
                                        1.0F);
        from += n, to += n, count -= n, left -= n;
        left = left > 0 ? left : chunk_bytes / 4;
    }
    return SMB_OK;
}

bool kernel_delta_encode(uint32_t width, uint8_t *old, const uint8_t *fresh, uint64_t count,
                         uint64_t first, struct delta_out *out)
{
    return isas[isa_current].delta_encode(width, old, fresh, count, first, out);
}

/* ---- crc32c (Castagnoli), reflected ---------------------------------------------------------- */

enum { CRC_STREAM = 1024 };
static uint32_t crc_table[8][256]; /* CRC of one byte that is followed by 0 to 7 others */
/* what a register's byte becomes after CRC_STREAM bytes of zeros */
static uint32_t crc_past_stream[4][256];

static uint32_t crc_by_table(uint32_t crc, const uint8_t *data, uint64_t bytes)
{
    for (; bytes >= 8; data += 8, bytes -= 8) {
        uint32_t low = crc ^ ((uint32_t)data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 |
                              (uint32_t)data[3] << 24);
        crc = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^
              crc_table[5][low >> 16 & 255] ^ crc_table[4][low >> 24] ^ crc_table[3][data[4]] ^
              crc_table[2][data[5]] ^ crc_table[1][data[6]] ^ crc_table[0][data[7]];
    }
    for (; bytes > 0; data++, bytes--)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *data) & 255];
    return crc;
}

__attribute__((constructor)) static void make_crc_tables(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78U : 0);
        crc_table[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (uint32_t i = 0; i < 256; i++)
            crc_table[k][i] = crc_table[k - 1][i] >> 8 ^ crc_table[0][crc_table[k - 1][i] & 255];
    static const uint8_t zeros[CRC_STREAM];
    for (int byte = 0; byte < 4; byte++) {
        uint32_t of_bit[8];
        for (int bit = 0; bit < 8; bit++)
            of_bit[bit] = crc_by_table(1U << (8 * byte + bit), zeros, CRC_STREAM);
        for (uint32_t i = 1; i < 256; i++) {
            int lowest = __builtin_ctz(i);
            crc_past_stream[byte][i] = crc_past_stream[byte][i & (i - 1)] ^ of_bit[lowest];
        }
    }
}

#if defined(__x86_64__)
static inline uint64_t load_as_is64(const uint8_t *data)
{
    uint64_t word;
    memcpy(&word, data, sizeof word);
    return word;
}

static uint32_t crc_past(uint32_t crc)
{
    return crc_past_stream[0][crc & 255] ^ crc_past_stream[1][crc >> 8 & 255] ^
           crc_past_stream[2][crc >> 16 & 255] ^ crc_past_stream[3][crc >> 24];
}

/* The instruction has a latency of three, so three streams run at once and are then joined. */
__attribute__((target("sse4.2"))) static uint32_t crc_by_instruction(uint32_t crc,
                                                                     const uint8_t *data,
                                                                     uint64_t bytes)
{
    for (; bytes >= 3 * CRC_STREAM; data += 3 * CRC_STREAM, bytes -= 3 * CRC_STREAM) {
        uint64_t a = crc, b = 0, c = 0;
        for (int i = 0; i < CRC_STREAM; i += 8) {
            a = _mm_crc32_u64(a, load_as_is64(data + i));
            b = _mm_crc32_u64(b, load_as_is64(data + CRC_STREAM + i));
            c = _mm_crc32_u64(c, load_as_is64(data + 2 * CRC_STREAM + i));
        }
        crc = crc_past(crc_past((uint32_t)a) ^ (uint32_t)b) ^ (uint32_t)c;
    }
    uint64_t rest = crc;
    for (; bytes >= 8; data += 8, bytes -= 8)
        rest = _mm_crc32_u64(rest, load_as_is64(data));
    for (; bytes > 0; data++, bytes--)
        rest = _mm_crc32_u8((uint32_t)rest, *data);
    return (uint32_t)rest;
}
#endif

uint32_t smb_crc32c(uint32_t crc, const void *data, uint64_t bytes)
{
#if defined(__x86_64__)
    if (isas[isa_current].crc_instruction)
        return ~crc_by_instruction(~crc, data, bytes);
#endif
    return ~crc_by_table(~crc, data, bytes);
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Other processes may look at the target through a view, without a lock. So each element there must
 * be whole at every instant: old or new. memcpy does not promise that, and `rep movsb` moves bytes.
 * Here every store is aligned, and as wide as the target's alignment and the remaining bytes allow.
 * Both are multiples of an element's size, so no store is smaller than an element. The
 * architectures promise that aligned stores of up to 8 bytes are atomic. Of an aligned vector
 * store, AArch64 makes each 8 bytes atomic (DDI 0487, B2.2.1). Intel and AMD promise it for 16
 * bytes, on processors with AVX. They do not promise it for wider stores, but all processors make
 * those of halves of 16 bytes or more.
 *
 * The compiler's loops (kernels_body.inc) may store vectors that are aligned only as their elements
 * are. Where such a store is cut, at the end of a cache line or page, an element ends, too. */

static inline void store_word(uint8_t *to, const uint8_t *from)
{
    uint64_t word;
    memcpy(&word, from, sizeof word);
    __atomic_store_n((uint64_t *)(void *)to, word, __ATOMIC_RELAXED);
}

/* Stores 1, 2 or 4 bytes; `to` is aligned to that number. */
static inline void store_part(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    uint32_t four;
    uint16_t two;
    switch (bytes) {
    case 4:
        memcpy(&four, from, sizeof four);
        __atomic_store_n((uint32_t *)(void *)to, four, __ATOMIC_RELAXED);
        break;
    case 2:
        memcpy(&two, from, sizeof two);
        __atomic_store_n((uint16_t *)(void *)to, two, __ATOMIC_RELAXED);
        break;
    default: __atomic_store_n(to, *from, __ATOMIC_RELAXED);
    }
}

static inline void copy_words(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    for (uint64_t part = 1; part < 8; part *= 2) {
        if (((uintptr_t)to & part) && bytes >= part) {
            store_part(to, from, part);
            to += part, from += part, bytes -= part;
        }
    }
    for (; bytes >= 8; to += 8, from += 8, bytes -= 8)
        store_word(to, from);
    for (uint64_t part = 4; part > 0; part /= 2) {
        if (bytes & part) {
            store_part(to, from, part);
            to += part, from += part;
        }
    }
}

void kernel_put(void *to, const void *from, uint32_t element)
{
    if (element == 8)
        store_word(to, from);
    else
        store_part(to, from, element);
}

/* The number of bytes before the next cache line begins, at most `bytes`. */
static inline uint64_t head_of(const uint8_t *to, uint64_t bytes)
{
    uint64_t head = -(uintptr_t)to % 64;
    return head < bytes ? head : bytes;
}

/* Uses vectors that every processor has. Volatile keeps the compiler from making it a memcpy. */
static void copy_generic(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    typedef uint64_t lanes __attribute__((vector_size(16), may_alias));
    uint64_t head = head_of(to, bytes);
    copy_words(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 64; to += 64, from += 64, bytes -= 64) {
        lanes parts[4];
        memcpy(parts, from, sizeof parts);
        for (int i = 0; i < 4; i++)
            ((volatile lanes *)(void *)to)[i] = parts[i];
    }
    copy_words(to, from, bytes);
}

#if defined(__x86_64__)
enum {
    /* processors with fast string instructions use them from this size up: the first cache does not
     * hold as much */
    COPIED_BY_STRING_BYTES = 24 << 10
};

TARGET_BEGIN("avx")
/* glibc copies more than some KiB with `rep movsb`. On an older EPYC that is 7 % slower at 256 KiB,
 * and 10 % with an unaligned source; on Zen 5 it is up to 1.3 times as fast. */
static void copy_avx(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    uint64_t head = head_of(to, bytes);
    copy_words(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= 128; to += 128, from += 128, bytes -= 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)from),
                b = _mm256_loadu_si256((const __m256i *)from + 1);
        __m256i c = _mm256_loadu_si256((const __m256i *)from + 2),
                d = _mm256_loadu_si256((const __m256i *)from + 3);
        _mm256_store_si256((__m256i *)to, a);
        _mm256_store_si256((__m256i *)to + 1, b);
        _mm256_store_si256((__m256i *)to + 2, c);
        _mm256_store_si256((__m256i *)to + 3, d);
    }
    copy_words(to, from, bytes);
}

static void copy_around_cache_avx(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    uint64_t head = head_of(to, bytes);
    copy_words(to, from, head);
    to += head, from += head, bytes -= head;
    /* streaming stores may pass earlier stores, but the odd sequence count must be seen before
     * them */
    _mm_sfence();
    for (; bytes >= 128; to += 128, from += 128, bytes -= 128) {
        /* a prefetch past the end does not access memory */
        _mm_prefetch((const char *)from + 1024, _MM_HINT_NTA);
        _mm_prefetch((const char *)from + 1088, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const __m256i *)from),
                b = _mm256_loadu_si256((const __m256i *)from + 1);
        __m256i c = _mm256_loadu_si256((const __m256i *)from + 2),
                d = _mm256_loadu_si256((const __m256i *)from + 3);
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)to + 1, b);
        _mm256_stream_si256((__m256i *)to + 2, c);
        _mm256_stream_si256((__m256i *)to + 3, d);
    }
    copy_words(to, from, bytes);
    _mm_sfence(); /* makes the stores visible to others before the unlock that follows */
}
TARGET_END

/* No prefetch instructions: these cores prefetch by themselves, and the instructions cost 7 % from
 * 16 MiB up. */
TARGET_BEGIN("avx512f")
static void copy_around_cache_wide(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
    uint64_t head = head_of(to, bytes);
    copy_words(to, from, head);
    to += head, from += head, bytes -= head;
    _mm_sfence(); /* as above */
    for (; bytes >= 128; to += 128, from += 128, bytes -= 128) {
        __m512i a = _mm512_loadu_si512(from), b = _mm512_loadu_si512(from + 64);
        _mm512_stream_si512((void *)to, a);
        _mm512_stream_si512((void *)(to + 64), b);
    }
    copy_words(to, from, bytes);
    _mm_sfence();
}
TARGET_END

/* A string of aligned words. An interrupt ends the instruction between two words. */
static void copy_by_string(uint8_t *to, const uint8_t *from, uint64_t bytes)
{
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    copy_avx(to, from, bytes); /* sanitizers can check this one */
#else
    uint64_t head = head_of(to, bytes), words = (bytes - head) / 8, tail = (bytes - head) % 8;
    copy_words(to, from, head);
    to += head, from += head;
    __asm__ volatile("rep movsq" : "+D"(to), "+S"(from), "+c"(words) : : "memory");
    copy_words(to, from, tail);
#endif
}
#endif

void kernel_copy(void *to, const void *from, uint64_t bytes, bool around_cache)
{
    if (bytes < 64) {
        copy_words(to, from, bytes);
        return;
    }
#if defined(__x86_64__)
    if (isa_current > 0) { /* avx2 or better */
        bool wide = isas[isa_current].wide;
        if (around_cache)
            (wide ? copy_around_cache_wide : copy_around_cache_avx)(to, from, bytes);
        else
            (wide && bytes >= COPIED_BY_STRING_BYTES ? copy_by_string : copy_avx)(to, from, bytes);
        return;
    }
#endif
    (void)around_cache;
    copy_generic(to, from, bytes);
}

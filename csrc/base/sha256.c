#include "base/sha256.h"

#include <string.h>

#include "smb/types.h"

_Static_assert((int)SHA256_BYTES == (int)SMB_KEY_BYTES, "keys are as long as what they make");

static const uint32_t first_words[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
static const uint32_t constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate(uint32_t x, int by)
{
    return x >> by | x << (32 - by);
}

static uint32_t load_big(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static void store_big(uint8_t *bytes, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        bytes[i] = (uint8_t)(value >> (24 - 8 * i));
}

static void mix(uint32_t words[8], const uint8_t block[SHA256_BLOCK_BYTES])
{
    uint32_t w[64], v[8];
    for (int i = 0; i < 16; i++)
        w[i] = load_big(block + 4 * i);
    for (int i = 16; i < 64; i++) {
        uint32_t low = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ w[i - 15] >> 3;
        uint32_t high = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ w[i - 2] >> 10;
        w[i] = w[i - 16] + low + w[i - 7] + high;
    }
    memcpy(v, words, sizeof v);
    for (int i = 0; i < 64; i++) {
        uint32_t high = rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25);
        uint32_t low = rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22);
        uint32_t first = v[7] + high + ((v[4] & v[5]) ^ (~v[4] & v[6])) + constants[i] + w[i];
        uint32_t second = low + ((v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]));
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += first;
        v[0] = first + second;
    }
    for (int i = 0; i < 8; i++)
        words[i] += v[i];
}

void sha256_begin(struct sha256 *hash)
{
    memcpy(hash->words, first_words, sizeof first_words);
    hash->bytes = 0;
}

void sha256_add(struct sha256 *hash, const void *data, size_t bytes)
{
    const uint8_t *from = data;
    while (bytes > 0) {
        size_t here = hash->bytes % SHA256_BLOCK_BYTES, take = SHA256_BLOCK_BYTES - here;
        if (take > bytes)
            take = bytes;
        memcpy(hash->block + here, from, take);
        hash->bytes += take;
        from += take;
        bytes -= take;
        if (here + take == SHA256_BLOCK_BYTES)
            mix(hash->words, hash->block);
    }
}

void sha256_end(struct sha256 *hash, uint8_t digest[SHA256_BYTES])
{
    uint64_t bits = hash->bytes * 8;
    uint8_t length[8];
    store_big(length, (uint32_t)(bits >> 32));
    store_big(length + 4, (uint32_t)bits);
    sha256_add(hash, "\x80", 1);
    while (hash->bytes % SHA256_BLOCK_BYTES != SHA256_BLOCK_BYTES - sizeof length)
        sha256_add(hash, "", 1);
    sha256_add(hash, length, sizeof length);
    for (int i = 0; i < 8; i++)
        store_big(digest + 4 * i, hash->words[i]);
}

static void begin_keyed(struct sha256 *hash, const uint8_t key[SHA256_BLOCK_BYTES], uint8_t pad)
{
    uint8_t padded[SHA256_BLOCK_BYTES];
    for (int i = 0; i < SHA256_BLOCK_BYTES; i++)
        padded[i] = key[i] ^ pad;
    sha256_begin(hash);
    sha256_add(hash, padded, sizeof padded);
}

void smb_hmac_sha256(const void *key, uint64_t key_bytes, const void *text, uint64_t bytes,
                     uint8_t mac[SMB_KEY_BYTES])
{
    struct sha256 hash;
    uint8_t block[SHA256_BLOCK_BYTES] = {0}, inner[SHA256_BYTES];
    if (key_bytes > sizeof block) {
        sha256_begin(&hash);
        sha256_add(&hash, key, key_bytes);
        sha256_end(&hash, block);
    } else {
        memcpy(block, key, key_bytes);
    }
    begin_keyed(&hash, block, 0x36);
    sha256_add(&hash, text, bytes);
    sha256_end(&hash, inner);
    begin_keyed(&hash, block, 0x5c);
    sha256_add(&hash, inner, sizeof inner);
    sha256_end(&hash, mac);
}

bool sha256_same(const uint8_t a[SHA256_BYTES], const uint8_t b[SHA256_BYTES])
{
    volatile uint8_t differ = 0; /* volatile, so that the compiler does not end the loop early */
    for (int i = 0; i < SHA256_BYTES; i++)
        differ |= a[i] ^ b[i];
    return differ == 0;
}

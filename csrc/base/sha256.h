/* sha256.h: SHA-256 (FIPS 180-4) and HMAC (RFC 2104). Pure. Written for readability, because it
 * hashes only a few short texts a second. */
#ifndef SMB_SHA256_H
#define SMB_SHA256_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { SHA256_BYTES = 32, SHA256_BLOCK_BYTES = 64 };

struct sha256 {
    uint32_t words[8];
    uint64_t bytes;
    uint8_t block[SHA256_BLOCK_BYTES];
};
void sha256_begin(struct sha256 *hash);
void sha256_add(struct sha256 *hash, const void *data, size_t bytes);
void sha256_end(struct sha256 *hash, uint8_t digest[SHA256_BYTES]);

/* Compares two hashes in a time that does not depend on where they differ. */
bool sha256_same(const uint8_t a[SHA256_BYTES], const uint8_t b[SHA256_BYTES]);

#endif

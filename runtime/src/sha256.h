/* SHA-256 (FIPS 180-4) for the C loader. */
#ifndef ATSC_SHA256_H
#define ATSC_SHA256_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct sha256 {
  uint32_t state[8];
  uint64_t num_bytes;
  unsigned char block[64];
} sha256;

static inline void sha256_start(sha256* hash) {
  static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  memcpy(hash->state, initial, sizeof initial);
  hash->num_bytes = 0;
}

static inline uint32_t sha256_turn(uint32_t x, int by) { return x >> by | x << (32 - by); }

static inline void sha256_block(uint32_t state[8], const unsigned char* block) {
  static const uint32_t k[64] = {
      0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4,
      0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe,
      0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f,
      0x4a7484aa, 0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7,
      0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc,
      0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b,
      0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116,
      0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
      0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7,
      0xc67178f2};
  uint32_t w[64], s[8];
  for (int i = 0; i < 16; ++i) {
    const unsigned char* at = block + 4 * i;
    w[i] = (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
  }
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    const uint32_t s0 = sha256_turn(a, 7) ^ sha256_turn(a, 18) ^ a >> 3;
    const uint32_t s1 = sha256_turn(b, 17) ^ sha256_turn(b, 19) ^ b >> 10;
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; ++i) {
    const uint32_t e1 = sha256_turn(s[4], 6) ^ sha256_turn(s[4], 11) ^ sha256_turn(s[4], 25);
    const uint32_t t1 = s[7] + e1 + ((s[4] & s[5]) ^ (~s[4] & s[6])) + k[i] + w[i];
    const uint32_t e0 = sha256_turn(s[0], 2) ^ sha256_turn(s[0], 13) ^ sha256_turn(s[0], 22);
    const uint32_t t2 = e0 + ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
    memmove(s + 1, s, 7 * sizeof s[0]);
    s[4] += t1;
    s[0] = t1 + t2;
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

static inline void sha256_add(sha256* hash, const void* data, size_t num_bytes) {
  const unsigned char* at = (const unsigned char*)data;
  size_t filled = hash->num_bytes % 64;
  hash->num_bytes += num_bytes;
  while (num_bytes > 0) {
    if (filled == 0 && num_bytes >= 64) {
      sha256_block(hash->state, at);
      at += 64;
      num_bytes -= 64;
      continue;
    }
    const size_t room = 64 - filled, taken = num_bytes < room ? num_bytes : room;
    memcpy(hash->block + filled, at, taken);
    at += taken;
    num_bytes -= taken;
    filled += taken;
    if (filled == 64) {
      sha256_block(hash->state, hash->block);
      filled = 0;
    }
  }
}

/* Writes 64 lower-case hex digits and a zero. */
static inline void sha256_finish(sha256* hash, char hex[65]) {
  static const char digits[] = "0123456789abcdef";
  const uint64_t num_bits = hash->num_bytes * 8;
  unsigned char length[8];
  for (int i = 0; i < 8; ++i) length[i] = (unsigned char)(num_bits >> (56 - 8 * i));
  sha256_add(hash, "\x80", 1);
  while (hash->num_bytes % 64 != 56) sha256_add(hash, "", 1);
  sha256_add(hash, length, 8);
  for (int i = 0; i < 64; ++i) hex[i] = digits[hash->state[i / 8] >> (28 - i % 8 * 4) & 15];
  hex[64] = '\0';
}

#endif

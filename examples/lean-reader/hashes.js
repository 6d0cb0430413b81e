// CRC-32, and BLAKE2b (RFC 7693) with a digest of 8 bytes: a parameter that Node's crypto cannot set.
"use strict";
const IV = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const SIGMA = [
  "0123456789abcdef", "ea489fd61c02b753", "b8c052fdae367194", "7931dcbe265a40f8", "905724afe1bc683d",
  "2c6a0b834d75fe19", "c51fed4a0763928b", "db7ec13950f4862a", "6fe9b308c2d714a5", "a2847615fb9e3cd0",
].map((row) => [...row].map((digit) => parseInt(digit, 16)));
const COLUMNS_AND_DIAGONALS = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];
const wrapped = (number) => BigInt.asUintN(64, number);
const turned = (number, bits) => (number >> bits) | wrapped(number << (64n - bits));

function compress(state, words, count, isLast) {
  const v = [...state, ...IV];
  v[12] ^= count;
  if (isLast) v[14] = wrapped(~v[14]);
  for (let round = 0; round < 12; round++) {
    COLUMNS_AND_DIAGONALS.forEach(([a, b, c, d], i) => {
      const sigma = SIGMA[round % 10];
      v[a] = wrapped(v[a] + v[b] + words[sigma[2 * i]]);
      v[d] = turned(v[d] ^ v[a], 32n);
      v[c] = wrapped(v[c] + v[d]);
      v[b] = turned(v[b] ^ v[c], 24n);
      v[a] = wrapped(v[a] + v[b] + words[sigma[2 * i + 1]]);
      v[d] = turned(v[d] ^ v[a], 16n);
      v[c] = wrapped(v[c] + v[d]);
      v[b] = turned(v[b] ^ v[c], 63n);
    });
  }
  return state.map((word, i) => word ^ v[i] ^ v[i + 8]);
}

exports.blake2b = (data) => {
  let state = [IV[0] ^ 0x01010000n ^ 8n, ...IV.slice(1)];
  for (let at = 0; at === 0 || at < data.length; at += 128) {
    const block = Buffer.alloc(128);
    data.copy(block, 0, at, at + 128);
    const words = Array.from({ length: 16 }, (_, i) => block.readBigUInt64LE(8 * i));
    state = compress(state, words, BigInt(Math.min(at + 128, data.length)), at + 128 >= data.length);
  }
  const digest = Buffer.alloc(8);
  digest.writeBigUInt64LE(state[0]);
  return digest.toString("hex");
};

exports.crc32 = (data) => {
  let sum = ~0;
  for (const byte of data) {
    sum ^= byte;
    for (let i = 0; i < 8; i++) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return ~sum >>> 0;
};

// Applies a package of cells (docs/wire-format.md, format 2) to a replica. README.md shows its use.
"use strict";
const fs = require("fs");
const { blake2b, crc32 } = require("./hashes.js");
const need = (condition, message) => { if (!condition) throw new Error(message); };

function readHeader(data, model) {
  need(data.length >= 42 && data.toString("latin1", 0, 3) === "GL\x02", "not a message of format 2");
  need(data[3] === 1 && data[5] === 6 && data[4] <= 1, "not a package of cells");
  const known = Buffer.concat([Buffer.from(model.run + model.layout, "hex"), Buffer.alloc(12)]); // not sent
  known.writeBigUInt64LE(BigInt(model.d), 16);
  known.writeUInt32LE(model.s, 24);
  const sum = crc32(Buffer.concat([data.subarray(42), data.subarray(0, 38), known]));
  need(sum === data.readUInt32LE(38), "wrong checksum: the message is damaged, or of another run or model");
  return { base: data.readUInt32LE(10), version: data.readUInt32LE(14), hash: data.toString("hex", 18, 26) };
}

function readTable(body, tensors) { // what is said of every tensor sent, and the bit streams
  let at = Math.ceil(tensors.length / 8), start = 0;
  const next = () => { need(at < body.length, "the table is cut off"); return body[at++]; };
  const isSent = (i) => (body[i >> 3] >> (i & 7)) & 1, sent = [];
  need(body.length >= at, "the bitmap of tensors is cut off");
  for (let i = tensors.length; i < 8 * at; i++) need(!isSent(i), "an unknown tensor is sent");
  for (const [i, { size, logarithmic }] of tensors.entries()) {
    start += size;
    if (!isSent(i)) continue;
    let count = 0, length = 0, byte;
    do {
      need(length < 5, "a varint has more than 5 bytes");
      count += ((byte = next()) & 127) * 128 ** length++;
    } while (byte >= 128);
    const exponent = logarithmic ? null : (next() << 24) >> 24, both = next();
    const k = (both & 7) === 7 ? next() : both & 7;
    need(count < size && k <= 30 && (count || both < 16), `tensor ${i} has a wrong count or parameter`);
    const gaps = { k: both >> 4, count }, cells = { k, count: count || size };
    sent.push({ start: start - size, size, exponent, order: (both >> 3) & 1, gaps, cells });
  }
  return [sent, body.subarray(at)];
}

function readStreams(bytes, lists) { // numbers in Rice codes: all remainders, then all quotients
  const end = 8 * bytes.length, bit = (i) => (bytes[i >>> 3] >>> (i & 7)) & 1;
  let low = 0, high = lists.reduce((sum, { k, count }) => sum + k * count, 0);
  need(lists.reduce((sum, { count }) => sum + count, high) <= end, "more numbers are announced than there are bits");
  for (const list of lists) {
    list.numbers = Float64Array.from({ length: list.count }, () => {
      let number = 0;
      for (let i = 0; i < list.k; i++) number += bit(low++) * 2 ** i;
      for (; high < end && !bit(high); high++) number += 2 ** list.k;
      need(high++ < end, "a number is cut off");
      return number;
    });
  }
  need(Math.ceil(high / 8) === bytes.length, "bytes follow the last number");
  for (; high < end; high++) need(!bit(high), "the padding is not zero");
}

function valueOf(code, { order, exponent }, origin) {
  need(code <= 2 ** 31 - 2, "a cell is too large");
  const cell = code < 3 ? [0, -1, 1, -1, 1, 0][3 * order + code] : code % 2 ? -(code + 1) / 2 : code / 2;
  if (exponent !== null) {
    const moved = cell * 2 ** exponent, value = origin + moved + 0; // + 0: zero is positive
    need(value - origin === moved && value - moved === origin && Math.fround(value) === value, "a value is not exact");
    return value;
  }
  const pattern = (new Uint32Array(Float32Array.of(origin).buffer)[0] >>> 20) + cell; // the logarithmic grid
  need(pattern >= 0 && pattern < 0x7f8, "a variance is negative or not finite");
  return new Float32Array(Uint32Array.of(pattern * 2 ** 20).buffer)[0];
}

function apply(body, { d, s, tensors }, origin, vector) { // returns how many entries of the vector it wrote
  need(body.length <= Math.ceil(tensors.length / 8) + 8 * tensors.length + Math.ceil((33 * (d + s)) / 8), "too long");
  const [sent, streams] = readTable(body, tensors);
  readStreams(streams, [...sent.map((tensor) => tensor.gaps), ...sent.map((tensor) => tensor.cells)]);
  for (const tensor of sent) {
    let place = tensor.start - 1;
    tensor.cells.numbers.forEach((code, i) => {
      place += 1 + (tensor.gaps.count ? tensor.gaps.numbers[i] : 0);
      need(place < tensor.start + tensor.size, "a position lies outside its tensor");
      vector[place] = valueOf(code, tensor, origin ? origin[place] : 0);
    });
  }
  return sent.reduce((sum, { cells }) => sum + cells.count, 0);
}

process.on("uncaughtException", ({ message }) => { console.error(`reader: ${message}`); process.exit(1); });
const [modelPath, originPath, replicaPath, held, packagePath, newPath] = process.argv.slice(2);
const model = JSON.parse(fs.readFileSync(modelPath, "utf8")), n = model.d + model.s;
const floats = (path) => new Float32Array(Uint8Array.from(fs.readFileSync(path)).buffer);
const data = fs.readFileSync(packagePath), { base, version, hash } = readHeader(data, model);
const isWhole = base === 0xffffffff, origin = originPath === "-" ? null : floats(originPath);
need(isWhole || String(base) === held, `the package starts from version ${base}, the replica holds ${held}`);
const vector = isWhole ? new Float32Array(n) : floats(replicaPath);
need(vector.length === n && (!origin || origin.length === n), `a vector does not have ${n} entries`);
const written = apply(data.subarray(42), model, origin, vector);
need(!isWhole || written === n, "a package without a base must hold the whole model");
const reached = blake2b(Buffer.from(vector.buffer));
need(hash === "0".repeat(16) || hash === reached, `the hash is ${reached}, ${hash} was announced`);
fs.writeFileSync(newPath, vector);
console.log(`version ${version}: ${written} of ${n} entries, hash ${reached}`);

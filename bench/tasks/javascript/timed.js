// Appends how long ago its job was added to a file, which the worker that started this host reads: see `latencies` in
// bench/src/ours.rs.
const fs = require("node:fs");
const os = require("node:os");
const path = require("node:path");

const file = path.join(os.tmpdir(), `graphile-worker-bench-latencies-${process.ppid}`);

module.exports = ({ at }) => {
  const latency = (performance.timeOrigin + performance.now()) / 1000 - at;
  fs.appendFileSync(file, `${latency}\n`);
};

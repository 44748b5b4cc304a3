// Counts its jobs, as every contestant's does, and writes down how many there were when its host ends: see
// `ran_in_hosts` in bench/src/ours.rs.
const fs = require("node:fs");
const os = require("node:os");
const path = require("node:path");

let jobs = 0;
let last = 0;

module.exports = () => {
  jobs += 1;
  last = (performance.timeOrigin + performance.now()) / 1000;
};

process.on("exit", () => {
  if (jobs > 0) fs.appendFileSync(path.join(os.tmpdir(), `graphile-worker-bench-ran-${process.ppid}`), `${jobs} ${last}\n`);
});
